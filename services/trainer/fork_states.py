"""Initial states with both outcomes among their rollouts, and what a target makes of them.

The rows are those of `worldserve fidelity`: one object an episode, with its true success and what the reward read in
the target.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.trainer.fidelity_result import rates
from services.trainer.fork_statistics import excess, summed
from services.trainer.shifts import flips

Row = Mapping[str, Any]


def read_fidelity_rows(directory: Path) -> list[dict[str, Any]]:
    """The rows of a fidelity run, which is only read.

    Raises:
        FileNotFoundError, ValueError: naming the file and what is missing in it.
    """
    path = directory / "episodes.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected the rows of `worldserve fidelity --out {directory}`; none are there")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    for number, row in enumerate(rows):
        missing = [name for name in ("episode_id", "initial_state_id", "success", "target") if name not in row]
        if missing or not isinstance(row["success"], bool) or "success" not in row["target"]:
            raise ValueError(
                f"{path}, line {number + 1}: expected episode_id, initial_state_id, success (true or false) and "
                f"target.success; missing or of another type: {', '.join(missing) or 'success'}"
            )
    return rows


def mixed_states(rows: Sequence[Row]) -> set[str]:
    """Initial states with both outcomes among their rollouts."""
    seen: dict[str, set[bool]] = {}
    for row in rows:
        seen.setdefault(row["initial_state_id"], set()).add(row["success"])
    return {state for state, outcomes in seen.items() if len(outcomes) == 2}


def summarise_states(
    rows: Sequence[Row], floor: Sequence[Row], states: set[str], confidence: float, seed: int
) -> dict[str, Any]:
    """Fake success, recall, discrimination on `states`, and fake success above the floor's failure -> success flips."""
    part = [row for row in rows if row["initial_state_id"] in states]
    truth, read = [row["success"] for row in part], [bool(row["target"]["success"]) for row in part]
    fakes = summed((r["initial_state_id"], bool(r["target"]["success"]), 1) for r in part if not r["success"])
    floor = [row for row in floor if row["initial_state_id"] in states]
    flipped = flips(floor, unmoved=False)
    found = rates(truth, read, [row["initial_state_id"] for row in part], confidence, seed) if part else None
    undefined = dict.fromkeys(("fake_success", "recall", "discrimination"))
    return {
        **(found.as_dict() if found else undefined),
        "above_floor": excess(fakes, flipped, confidence, seed),
        "states": len({row["initial_state_id"] for row in part}),
        "failures": truth.count(False),
        "successes": truth.count(True),
        # What the floor under `above_floor` rests on: replays that fail where the start has not moved.
        "floor_failures": {"episodes": sum(not row["unmoved"] for row in floor), "states": len(flipped)},
    }
