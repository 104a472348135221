"""Figures of closed-loop replay, made of its rows: mismatch of a policy and a baseline, and the excess.

A row is one episode: `judged` 1 or 0 in the target, `reference_success` 1 or 0 in the simulator, -1 where it was not
replayed (see `closed_loop.run_round`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.trainer.statistics import DEFAULT_RESAMPLES, Interval, wilson_interval

Row = Mapping[str, Any]


def replayed_successes(rows: Sequence[Row]) -> list[Row]:
    """Those that were judged successful in the target and replayed."""
    return [row for row in rows if row["judged"] == 1 and row["reference_success"] >= 0]


def ratio_interval(
    ratios: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
    generator: np.random.Generator,
    confidence: float,
    resamples: int = DEFAULT_RESAMPLES,
) -> Interval | None:
    """A ratio of sums over states, or the difference of two, with a percentile bootstrap over states.

    The states are resampled, not the episodes, and both ratios over the same states (paired; Cameron, Gelbach and
    Miller 2008, section II). A resample in which a ratio has no trial may be anything: it widens the interval at both
    ends, to the range of the figure. A ratio of 0 or 1 has no spread to resample, though a few states cannot show that
    it is exactly that: its side is widened to Wilson's bound over the states that have a trial, a difference by the
    root of the squares (Newcombe 1998, method 10).

    Args:
        ratios: one (ratio) or two (first minus second), each (events, trials) int64 (states,).

    Returns:
        The interval, `count` the smallest number of trials; None where a ratio has no trial at all.
    """
    if not 1 <= len(ratios) <= 2 or len({array.shape for pair in ratios for array in pair}) != 1:
        raise ValueError("ratios: expected one or two pairs of arrays over the same states")
    trials = [int(trial.sum()) for _, trial in ratios]
    if not min(trials, default=0):
        return None
    states = len(ratios[0][0])
    weights = generator.multinomial(states, np.full(states, 1.0 / states), size=resamples)
    point, drawn = 0.0, np.zeros(resamples)
    for sign, (event, trial) in zip((1.0, -1.0), ratios):
        point += sign * float(event.sum() / trial.sum())
        below = weights @ trial
        drawn += sign * np.where(below > 0, weights @ event / np.maximum(below, 1), np.nan)
    tail = (1.0 - confidence) / 2.0
    least, most = (0.0, 1.0) if len(ratios) == 1 else (-1.0, 1.0)
    low = float(np.quantile(np.nan_to_num(drawn, nan=least), tail))
    high = float(np.quantile(np.nan_to_num(drawn, nan=most), 1.0 - tail))
    unseen = [_unseen(event, trial, confidence) for event, trial in ratios]
    below_second, above_second = unseen[1] if len(unseen) == 2 else (0.0, 0.0)
    if any(down or up for down, up in unseen):
        low = point - math.hypot(point - low, unseen[0][0], above_second)
        high = point + math.hypot(high - point, unseen[0][1], below_second)
    return Interval(point, max(low, least), min(high, most), min(trials), confidence)


def _unseen(event: NDArray[np.int64], trial: NDArray[np.int64], confidence: float) -> tuple[float, float]:
    """How far below and above a ratio of exactly 0 or 1 may lie, which resampling cannot see; 0 for all others."""
    if 0 < event.sum() < trial.sum():
        return 0.0, 0.0
    states = int((trial > 0).sum())
    bound = wilson_interval(states if event.sum() else 0, states, confidence)
    return bound.value - bound.low, bound.high - bound.value


def summarise(
    rows: Sequence[Row], baseline: bool, replay_failures: bool, confidence: float, bootstrap_seed: int
) -> dict[str, Any]:
    """Mismatch of policy and baseline, and the excess. Re-derivable from the rows alone.

    The count of an interval is the number of replayed successes (of the checkpoint with fewer, for the excess).
    """
    states = sorted({row["initial_state_id"] for row in rows})
    tables, result = {}, dict[str, Any](policy=None, baseline=None, excess=None)

    def interval(*ratios: tuple[NDArray[np.int64], NDArray[np.int64]]) -> dict[str, float | int] | None:
        found = ratio_interval(ratios, np.random.default_rng(bootstrap_seed), confidence)
        return found.as_dict() if found else None

    for name in ("policy", "baseline") if baseline else ("policy",):
        own = [row for row in rows if row["checkpoint"] == name]
        successes = replayed_successes(own)
        failed = [row for row in successes if row["reference_success"] == 0]
        tables[name] = (_by_state(failed, states), _by_state(successes, states))
        result[name] = {
            "mismatch": interval(tables[name]),
            "replayed": len(successes),
            "failed": len(failed),
            "failed_read_as_success": _read_as_success(failed),
            "episodes": len(own),
            "states": len({row["initial_state_id"] for row in own}),
            "judged_successful": interval((_by_state([r for r in own if r["judged"]], states), _by_state(own, states))),
        }
        if replay_failures:
            failures = [row for row in own if row["judged"] == 0]
            missed = [row for row in failures if row["reference_success"] == 1]
            result[name]["missed_success"] = interval((_by_state(missed, states), _by_state(failures, states)))
    if baseline:
        result["excess"] = interval(tables["policy"], tables["baseline"])
    return result


def _by_state(rows: Sequence[Row], states: Sequence[str]) -> NDArray[np.int64]:
    counts = dict.fromkeys(states, 0)
    for row in rows:
        counts[row["initial_state_id"]] += 1
    return np.array(list(counts.values()), np.int64)


def _read_as_success(failed: Sequence[Row]) -> int | None:
    """How many failed replays the reference's own reward reads as success: the reward's fault and not the world
    model's. None where the reference has no reward."""
    if any(row["reference_verdict"] < 0 for row in failed):
        return None
    return sum(row["reference_verdict"] for row in failed)
