"""Figures of closed-loop replay, made of its rows: mismatch of a policy and a baseline, and the excess.

A row is one episode: `judged` 1 or 0 in the target, `reference_success` 1 or 0 in the simulator, -1 where it was not
replayed (see `closed_loop.run_round`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.trainer.statistics import Interval, cluster_ratio, cluster_ratio_difference, wilson_interval

Row = Mapping[str, Any]
Counts = NDArray[np.int64]


def replayed_successes(rows: Sequence[Row]) -> list[Row]:
    """Those that were judged successful in the target and replayed."""
    return [row for row in rows if row["judged"] == 1 and row["reference_success"] >= 0]


def share(events: Counts, trials: Counts, confidence: float, seed: int) -> Interval | None:
    """Events over trials, int64 (states,) each, with a bootstrap over states; None without a trial.

    A share of 0 or 1 has no spread to resample, though few states cannot show that it is exactly that: its interval
    reaches to Wilson's bound over the states that have a trial.
    """
    if not trials.sum():
        return None
    found = cluster_ratio(events, trials, np.random.default_rng(seed), confidence)
    below, above = _unseen(events, trials, confidence)
    return dataclasses.replace(found, low=found.low - below, high=found.high + above)


def excess(
    first: tuple[Counts, Counts], second: tuple[Counts, Counts], confidence: float, seed: int
) -> Interval | None:
    """The share of `first` minus that of `second`, (events, trials) of the same states each, which are drawn as pairs.

    None where one side has no trial. What resampling cannot see of a share of 0 or 1 (see `share`) is added to the
    interval as the root of the squares (Newcombe 1998, method 10).
    """
    if not (first[1].sum() and second[1].sum()):
        return None
    found = cluster_ratio_difference(first, second, np.random.default_rng(seed), confidence)
    (first_below, first_above), (second_below, second_above) = (_unseen(*pair, confidence) for pair in (first, second))
    low, high = found.low, found.high
    if first_below or second_above:
        low = found.value - math.hypot(found.value - low, first_below, second_above)
    if first_above or second_below:
        high = found.value + math.hypot(high - found.value, first_above, second_below)
    return dataclasses.replace(found, low=max(low, -1.0), high=min(high, 1.0))


def _unseen(events: Counts, trials: Counts, confidence: float) -> tuple[float, float]:
    """How far below and above a share of exactly 0 or 1 may lie; 0 and 0 for all others."""
    if 0 < events.sum() < trials.sum():
        return 0.0, 0.0
    states = int((trials > 0).sum())
    bound = wilson_interval(states if events.sum() else 0, states, confidence)
    return bound.value - bound.low, bound.high - bound.value


def summarise(
    rows: Sequence[Row], baseline: bool, replay_failures: bool, confidence: float, bootstrap_seed: int
) -> dict[str, Any]:
    """Mismatch of policy and baseline, and the excess. Re-derivable from the rows alone.

    The count of an interval is that of its states; a state where one side has no success still counts.
    """
    states = sorted({row["initial_state_id"] for row in rows})
    tables, result = {}, dict[str, Any](policy=None, baseline=None, excess=None)

    def rate(events: Sequence[Row], trials: Sequence[Row]) -> dict[str, float | int] | None:
        found = share(_by_state(events, states), _by_state(trials, states), confidence, bootstrap_seed)
        return found.as_dict() if found else None

    for name in ("policy", "baseline") if baseline else ("policy",):
        own = [row for row in rows if row["checkpoint"] == name]
        successes = replayed_successes(own)
        failed = [row for row in successes if row["reference_success"] == 0]
        tables[name] = (_by_state(failed, states), _by_state(successes, states))
        result[name] = {
            "mismatch": rate(failed, successes),
            "replayed": len(successes),
            "failed": len(failed),
            "failed_read_as_success": _read_as_success(successes),
            "episodes": len(own),
            "states": len({row["initial_state_id"] for row in own}),
            "judged_successful": rate([row for row in own if row["judged"]], own),
        }
        if replay_failures:
            failures = [row for row in own if row["judged"] == 0]
            result[name]["missed_success"] = rate([row for row in failures if row["reference_success"]], failures)
    if baseline:
        found = excess(tables["policy"], tables["baseline"], confidence, bootstrap_seed)
        result["excess"] = found.as_dict() if found else None
    return result


def _by_state(rows: Sequence[Row], states: Sequence[str]) -> Counts:
    counts = dict.fromkeys(states, 0)
    for row in rows:
        counts[row["initial_state_id"]] += 1
    return np.array(list(counts.values()), np.int64)


def _read_as_success(successes: Sequence[Row]) -> int | None:
    """How many failed replays the reward reads as success in the reference's frames, too: its fault and not the world
    model's. None where the reference has no reward."""
    if any(row["reference_verdict"] < 0 for row in successes):
        return None
    return sum(row["reference_verdict"] for row in successes if row["reference_success"] == 0)
