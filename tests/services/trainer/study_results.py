"""Files of finished runs, written by hand for tests of figures and of the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.trainer.study_record import FROZEN, criterion_sha256, run_text

STATES = 20
EVALUATION = {"seeds": [0, 1], "max_states": None, "mode": "mean", "confidence": 0.9}
SETTINGS = {"limit_as": "terminated", "learning_rate": 5e-5}
CRITERION = {
    "arm": "corrected", "gain_above_pp": 0.0, "low_above_pp": 0.0, "sd_below_pp": 7.0,
    "mismatch_excess_high_below": 0.1,
}  # fmt: skip


def interval(value: float, low: float, high: float) -> dict[str, float | int]:
    return {"value": value, "low": low, "high": high, "count": STATES, "confidence": 0.9}


def write_frozen(directory: Path, arms: Mapping[str, Sequence[bool]], seeds: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """A frozen file with factors a and b; `arms` maps a name to its levels, () for one beside the factorial."""
    frozen: dict[str, Any] = {
        "study": "hand", "date": "2026-11-30", "commit": "0123456789ab", "criterion": CRITERION, "seeds": list(seeds),
        "evaluation": EVALUATION, "factors": ["a", "b"],
        "arms": {
            name: {
                "command": "ppo", "target": "world_model", "settings": SETTINGS, "seeds": list(seeds),
                "world_models": ["mended"], "levels": dict(zip(("a", "b"), levels)),
            }
            for name, levels in arms.items()
        },
    }  # fmt: skip
    frozen["criterion_sha256"] = criterion_sha256(frozen)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FROZEN).write_text(json.dumps(frozen))
    return frozen


def write_run(
    directory: Path,
    arm: str,
    seed: int,
    successes: int,
    excess_high: float | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """A run that succeeds in the first `successes` of STATES states; `facts` replace those of its first line."""
    name = arm if arm == "sft" else f"{arm}--mended--seed-{seed}"
    mismatch = None
    if excess_high is not None:
        part = {"mismatch": interval(0.2, 0.1, 0.3), "replayed": 310, "failed": 62}
        excess = interval(0.02, -0.02, excess_high)
        mismatch = {"policy": part, "baseline": {**part, "replayed": 305}, "excess": excess}
    stored = {
        "study": "hand", "run": name, "arm": arm, "world_model": "" if arm == "sft" else "mended", "seed": seed,
        "depends": {"evaluation": EVALUATION, "settings": SETTINGS, "command": "ppo"},
        "evaluation": {"initial_states_sha256": "s", "max_states": None, "evaluation_seeds": [0, 1], "mode": "mean",
                       "interface": "i", "provenance": "p"},
        "mismatch": mismatch, "date": "2026-11-30",
        "cpu_s": {"train": {"wall_s": 900.0, "commands": 300.0, "world_model_source": 270.0, "trainer": 30.0}},
        **(facts or {}),
    }  # fmt: skip
    metrics = [] if arm == "sft" else [{"iteration": i, "env/verdict": 0.5 + 0.01 * i} for i in range(3)]
    episodes = [
        {"initial_state_id": f"test/{state:04d}", "evaluation_seed": s, "success": int(state < successes), "verdict": 1}
        for state in range(STATES)
        for s in (0, 1)
    ]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.jsonl").write_text(run_text(stored, metrics, episodes))
