"""Figures of a study, made of its finished runs: gains, arms, effects of a factorial, and its frozen criterion.

A gain is paired: per test state, the trained policy's mean outcome minus the starting policy's, in percentage points;
its interval is a bootstrap over states (`statistics.paired_bootstrap`). What is said of an *arm* must hold for seeds
that were not run, so its unit is the seed: Student's t for a mean, and for an effect of the factorial, a contrast of
arms with unequal variances, t with Satterthwaite's degrees of freedom (Welch 1951; Satterthwaite 1946).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.trainer.statistics import Interval, paired_bootstrap
from services.trainer.study_record import REFERENCE, FinishedRun, check_paired

BOOTSTRAP_SEED = 0


@dataclass(frozen=True)
class RunGain:
    """One finished run. Gains are in percentage points, `mismatch_excess` in shares (None: not measured)."""

    run: str
    arm: str
    world_model: str
    seed: int
    gain: Interval
    success: float
    mismatch: Interval | None
    mismatch_excess: Interval | None
    mismatch_replayed: int | None
    cpu_minutes: float


@dataclass(frozen=True)
class ArmFigures:
    """An arm over its seeds; numbers that need more seeds than there are are None."""

    arm: str
    world_model: str
    seeds: tuple[int, ...]
    mean_pp: Interval | None
    sd_pp: float | None
    min_low_pp: float
    above_zero: int
    lows_above_zero: int
    cpu_minutes: float


@dataclass(frozen=True)
class Check:
    """One clause of a criterion: `met` is None while runs that it needs are missing and none has broken it."""

    clause: str
    met: bool | None
    found: str


def run_gains(runs: Mapping[str, FinishedRun], confidence: float) -> list[RunGain]:
    """Every trained run, paired with the reference; none while the reference is not done.

    Raises:
        ValueError: where a run cannot be paired with the reference.
    """
    reference = runs.get(REFERENCE)
    if reference is None:
        return []
    found = []
    for name, run in runs.items():
        if name == REFERENCE:
            continue
        check_paired(run, reference)
        gain = paired_bootstrap(run.success, reference.success, np.random.default_rng(BOOTSTRAP_SEED), confidence)
        measured = run.facts.get("mismatch") or {}
        policy = measured.get("policy") or {}
        found.append(
            RunGain(
                run=name,
                arm=str(run.facts["arm"]),
                world_model=str(run.facts["world_model"]),
                seed=int(run.facts["seed"]),
                gain=_in_points(gain),
                success=success_rate(run),
                mismatch=_interval(policy.get("mismatch")),
                mismatch_excess=_interval(measured.get("excess")),
                mismatch_replayed=_fewest_replayed(measured),
                cpu_minutes=cpu_minutes(run),
            )
        )
    return sorted(found, key=lambda gain: (gain.arm, gain.world_model, gain.seed))


def success_rate(run: FinishedRun) -> float:
    """Mean over test states of each state's mean outcome."""
    return float(np.mean([np.mean(outcomes) for outcomes in run.success.values()]))


def cpu_minutes(run: FinishedRun) -> float:
    """CPU time of all stages and processes of a run, in minutes."""
    phases: Mapping[str, Mapping[str, float]] = run.facts.get("cpu_s", {})
    return sum(value for costs in phases.values() for name, value in costs.items() if name != "wall_s") / 60.0


def arm_figures(gains: Sequence[RunGain], confidence: float) -> list[ArmFigures]:
    """Mean with a t-interval over seeds, SD over seeds (n - 1), lowest lower bound; by arm and world model."""
    found = []
    for (arm, world_model), own in _grouped(gains).items():
        values = [gain.gain.value for gain in own]
        found.append(
            ArmFigures(
                arm=arm,
                world_model=world_model,
                seeds=tuple(gain.seed for gain in own),
                mean_pp=mean_interval(values, confidence) if len(values) > 1 else None,
                sd_pp=float(np.std(values, ddof=1)) if len(values) > 1 else None,
                min_low_pp=min(gain.gain.low for gain in own),
                above_zero=sum(value > 0 for value in values),
                lows_above_zero=sum(gain.gain.low > 0 for gain in own),
                cpu_minutes=float(np.mean([gain.cpu_minutes for gain in own])),
            )
        )
    return found


def mean_interval(values: Sequence[float], confidence: float) -> Interval:
    """Mean of at least 2 independent values with Student's t-interval."""
    return _contrast([(1.0, values)], confidence)


def factorial_effects(
    levels: Mapping[str, Mapping[str, bool]], gains: Sequence[RunGain], world_model: str, confidence: float
) -> dict[str, Interval | None]:
    """Main effects of a 2^k factorial, and the interactions of two factors ("a x b"), in percentage points.

    A main effect is the mean gain of the arms with the fix minus that of the arms without. An interaction of two is
    half the difference between the effect of one with the other and without it. None where an arm has fewer than two
    seeds.

    Args:
        levels: which fixes each of the 2^k arms has.
        world_model: the one whose runs count.
    """
    factors = list(next(iter(levels.values()), {}))
    values = {
        arm: [gain.gain.value for gain in gains if gain.arm == arm and gain.world_model == world_model]
        for arm in levels
    }
    complete = len(levels) == 2 ** len(factors) and all(len(found) > 1 for found in values.values())
    effects: dict[str, Interval | None] = {}
    for size in (1, 2):
        for chosen in itertools.combinations(factors, size):
            parts = [
                (math.prod(1 if levels[arm][factor] else -1 for factor in chosen) * 2.0 / len(levels), values[arm])
                for arm in levels
            ]
            effects[" x ".join(chosen)] = _contrast(parts, confidence) if complete else None
    return effects


def _contrast(parts: Sequence[tuple[float, Sequence[float]]], confidence: float) -> Interval:
    """sum of weight * mean(values), each group with its own variance. `count` is the number of values in all."""
    from scipy.stats import t

    groups = [(weight, np.asarray(values, np.float64)) for weight, values in parts]
    if any(len(values) < 2 or not np.isfinite(values).all() for _, values in groups):
        raise ValueError("values: expected at least two finite numbers in every group")
    value = float(sum(weight * values.mean() for weight, values in groups))
    errors = [weight**2 * float(values.var(ddof=1)) / len(values) for weight, values in groups]
    total, count = sum(errors), sum(len(values) for _, values in groups)
    if total == 0.0:  # all seeds alike: there is no spread to say anything by
        return Interval(value, value, value, count, confidence)
    freedom = total**2 / sum(error**2 / (len(values) - 1) for error, (_, values) in zip(errors, groups))
    half = float(t.ppf(0.5 + confidence / 2.0, freedom)) * math.sqrt(total)
    return Interval(value, value - half, value + half, count, confidence)


def check_criterion(frozen: Mapping[str, Any], gains: Sequence[RunGain]) -> list[Check]:
    """Every clause of the frozen criterion against the runs of its arm in the arm's first world model.

    Args:
        frozen: what frozen.json holds.
    """
    criterion = frozen.get("criterion")
    if not criterion:
        return []
    arm = frozen["arms"][criterion["arm"]]
    world_model, wanted = next(iter(arm["world_models"]), ""), len(arm["seeds"])
    own = {g.seed: g for g in gains if g.arm == criterion["arm"] and g.world_model == world_model}
    present = [own[seed] for seed in arm["seeds"] if seed in own]
    whole = len(present) == wanted
    values = [gain.gain.value for gain in present]
    checks = []
    if (bound := criterion["gain_above_pp"]) is not None:
        checks.append(_all_above(f"every gain > {bound:g} pp", values, bound, whole, wanted))
    if (bound := criterion["low_above_pp"]) is not None:
        clause = f"every {frozen['evaluation']['confidence']:.0%} lower bound > {bound:g} pp"
        checks.append(_all_above(clause, [gain.gain.low for gain in present], bound, whole, wanted))
    if (bound := criterion["sd_below_pp"]) is not None:
        sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
        found = "no two seeds yet" if sd is None else f"{sd:.1f} over {len(values)} of {wanted} seeds"
        met = bool(sd is not None and sd < bound) if whole else None
        checks.append(Check(f"SD over seeds < {bound:g} pp", met, found))
    if (bound := criterion["mismatch_excess_high_below"]) is not None:
        highs = [gain.mismatch_excess.high for gain in present if gain.mismatch_excess is not None]
        met = False if any(high >= bound for high in highs) else (True if highs and len(highs) == wanted else None)
        found = f"largest {max(highs):+.3f} over {len(highs)} of {wanted} seeds" if highs else "not measured"
        checks.append(Check(f"every upper bound of the excess mismatch < {bound:g}", met, found))
    return checks


def verdict(checks: Sequence[Check]) -> bool | None:
    """Whether a criterion is met: None while that is open."""
    if any(check.met is False for check in checks):
        return False
    return True if checks and all(check.met for check in checks) else None


def _all_above(clause: str, values: Sequence[float], bound: float, whole: bool, wanted: int) -> Check:
    broken = any(value <= bound for value in values)
    met = False if broken else (True if whole and values else None)
    found = f"least {min(values):+.1f} over {len(values)} of {wanted} seeds" if values else "no run yet"
    return Check(clause, met, found)


def _grouped(gains: Sequence[RunGain]) -> dict[tuple[str, str], list[RunGain]]:
    groups: dict[tuple[str, str], list[RunGain]] = {}
    for gain in gains:
        groups.setdefault((gain.arm, gain.world_model), []).append(gain)
    return groups


def _in_points(gain: Interval) -> Interval:
    return Interval(100.0 * gain.value, 100.0 * gain.low, 100.0 * gain.high, gain.count, gain.confidence)


def _interval(found: Mapping[str, Any] | None) -> Interval | None:
    return Interval(**found) if found else None


def _fewest_replayed(measured: Mapping[str, Any]) -> int | None:
    counts = [part["replayed"] for part in (measured.get("policy"), measured.get("baseline")) if part]
    return min(counts) if counts else None
