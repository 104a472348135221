"""A study's figures for `results/summary.json`, which docs/results.md is made from: `worldserve study --record`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.trainer.statistics import Interval
from services.trainer.study_statistics import ArmFigures, RunGain, arm_figures, factorial_effects
from worldserve.results import SUMMARY_PATH, record


@dataclass(frozen=True)
class StudyFigure:
    """One figure to be recorded; `n` counts training seeds, or runs for an effect."""

    value: float
    low: float | None
    high: float | None
    n: int
    note: str


def study_figures(frozen: Mapping[str, Any], gains: Sequence[RunGain], prefix: str) -> dict[str, StudyFigure]:
    """Figures by key, of arms whose frozen seeds are all done, and of effects whose arms are.

    PREFIX.ARM.mean_pp, sd_pp, seeds_above_zero, min_low_pp, cpu_minutes; PREFIX.effect.FACTOR; and
    mismatch.ARM.excess_high, the largest over seeds. An arm in another world model than its first has that one's name
    in its own.
    """
    confidence = float(frozen["evaluation"]["confidence"])
    found: dict[str, StudyFigure] = {}
    whole: set[tuple[str, str]] = set()
    for arm in arm_figures(gains, confidence):
        known = frozen["arms"].get(arm.arm)
        if known is None or set(known["seeds"]) - set(arm.seeds) or len(arm.seeds) < 2:
            continue
        whole.add((arm.arm, arm.world_model))
        own = [gain for gain in gains if (gain.arm, gain.world_model) == (arm.arm, arm.world_model)]
        found |= _arm_figures(arm, own, _key(arm.arm, arm.world_model, known["world_models"]), prefix)
    levels = {name: arm["levels"] for name, arm in frozen["arms"].items() if arm["levels"]}
    first: list[str] = next((arm["world_models"][:1] for arm in frozen["arms"].values() if arm["levels"]), [])
    for world_model in first:
        if not all((name, world_model) in whole for name in levels):
            continue
        for effect, interval in factorial_effects(levels, gains, world_model, confidence).items():
            if interval is not None:
                kind = "interaction" if " x " in effect else "main effect"
                note = f"{kind} on the gain over SFT, percentage points, t over seeds"
                found[f"{prefix}.effect.{_word(effect)}"] = _figure(interval, interval.count, note)
    return found


def _arm_figures(arm: ArmFigures, own: Sequence[RunGain], key: str, prefix: str) -> dict[str, StudyFigure]:
    assert arm.mean_pp is not None
    assert arm.sd_pp is not None
    count = len(arm.seeds)
    gains = " ".join(f"{gain.gain.value:+.1f}" for gain in own)
    found = {
        f"{prefix}.{key}.mean_pp": _figure(arm.mean_pp, count, f"mean gain over SFT, t over seeds; each: {gains}"),
        f"{prefix}.{key}.sd_pp": StudyFigure(arm.sd_pp, None, None, count, "SD of the gains over seeds"),
        f"{prefix}.{key}.seeds_above_zero": StudyFigure(float(arm.above_zero), None, None, count, "seeds that gained"),
        f"{prefix}.{key}.min_low_pp": StudyFigure(arm.min_low_pp, None, None, count, "least lower bound of a seed"),
        f"{prefix}.{key}.cpu_minutes": StudyFigure(arm.cpu_minutes, None, None, count, "CPU-minutes a run, all stages"),
    }
    highs = [gain.mismatch_excess.high for gain in own if gain.mismatch_excess is not None]
    if len(highs) == count:
        replays = min(gain.mismatch_replayed or 0 for gain in own)
        note = f"largest upper bound of a seed's excess mismatch over SFT; at least {replays} replays each"
        found[f"mismatch.{key}.excess_high"] = StudyFigure(max(highs), None, None, count, note)
    return found


def record_figures(
    frozen: Mapping[str, Any], gains: Sequence[RunGain], prefix: str, path: Path = SUMMARY_PATH
) -> list[str]:
    """Writes a study's figures; returns their keys."""
    figures = study_figures(frozen, gains, prefix)
    command = f"worldserve study {frozen['file']} --record {prefix}"
    for key, figure in figures.items():
        record(key, figure.value, figure.low, figure.high, figure.n, command=command, note=figure.note, path=path)
    return list(figures)


def _figure(interval: Interval, count: int, note: str) -> StudyFigure:
    return StudyFigure(interval.value, interval.low, interval.high, count, note)


def _key(arm: str, world_model: str, world_models: Sequence[str]) -> str:
    return _word(arm if world_model == next(iter(world_models), "") else f"{arm}_{world_model}")


def _word(name: str) -> str:
    """As a part of a key: lower-case letters, digits and _."""
    return re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_")
