"""Figures of closed-loop replay, made of its rows: mismatch of a policy and a baseline, and the excess.

A row is one episode: `judged` 1 or 0 in the target, `reference_success` 1 or 0 in the simulator, -1 where it was not
replayed (see `closed_loop.run_round`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.trainer.fork_statistics import excess, rate, summed

Row = Mapping[str, Any]


def replayed_successes(rows: Sequence[Row]) -> list[Row]:
    """Those that were judged successful in the target and replayed."""
    return [row for row in rows if row["judged"] == 1 and row["reference_success"] >= 0]


def summarise(
    rows: Sequence[Row], baseline: bool, replay_failures: bool, confidence: float, bootstrap_seed: int
) -> dict[str, Any]:
    """Mismatch of policy and baseline, and the excess. Re-derivable from the rows alone.

    The count of an interval is that of the states that have such an episode, on both sides for the excess.
    """
    states = sorted({row["initial_state_id"] for row in rows})
    tables, result = {}, dict[str, Any](policy=None, baseline=None, excess=None)

    def share(events: Sequence[Row], trials: Sequence[Row]) -> dict[str, Any] | None:
        return rate(_by_state(events, trials, states), confidence, bootstrap_seed)

    for name in ("policy", "baseline") if baseline else ("policy",):
        own = [row for row in rows if row["checkpoint"] == name]
        successes = replayed_successes(own)
        failed = [row for row in successes if row["reference_success"] == 0]
        tables[name] = _by_state(failed, successes, states)
        result[name] = {
            "mismatch": share(failed, successes),
            "replayed": len(successes),
            "failed": len(failed),
            "failed_read_as_success": _read_as_success(successes),
            "episodes": len(own),
            "states": len({row["initial_state_id"] for row in own}),
            "judged_successful": share([row for row in own if row["judged"]], own),
        }
        if replay_failures:
            failures = [row for row in own if row["judged"] == 0]
            result[name]["missed_success"] = share([row for row in failures if row["reference_success"]], failures)
    if baseline:
        result["excess"] = excess(tables["policy"], tables["baseline"], confidence, bootstrap_seed)
    return result


def _by_state(events: Sequence[Row], trials: Sequence[Row], states: Sequence[str]) -> Mapping[str, tuple[float, float]]:
    """Events and trials of every state, also of those without any."""
    return summed(
        [
            *((state, 0, 0) for state in states),
            *((row["initial_state_id"], 1, 0) for row in events),
            *((row["initial_state_id"], 0, 1) for row in trials),
        ]
    )


def _read_as_success(successes: Sequence[Row]) -> int | None:
    """How many failed replays the reward reads as success in the reference's frames, too: its fault and not the world
    model's. None where the reference has no reward."""
    if any(row["reference_verdict"] < 0 for row in successes):
        return None
    return sum(row["reference_verdict"] for row in successes if row["reference_success"] == 0)
