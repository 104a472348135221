"""A negative control: a "reward" that sees no frame, only the executed actions and where the bottle stood.

    python -m benchmarks.geometry_reward --train runs/policy-b0 runs/rollouts --test runs/reward-held-out

A small network reads the path of the active hand relative to the bottle (forward kinematics of the executed targets,
around the moment at which the gripper closes) and the true pose of the bottle from the sealed initial states, and is
fitted to the simulator's success. It says two things: how far a reader with privileged geometry gets from so many
labels, which is what to hold a world model's outcomes against (no bound: pixels say more than labels); and that such a
shortcut is no reward, for it reads the plan and not what came of it. States of the test data must not be in the
training data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from services.wm_server.dataset import episode_poses
from services.wm_server.outcomes import area_under_curve
from worldserve.episodes import EpisodeReader, refuse_for_training

OFFSETS = (-20, -10, -5, 0, 5, 10, 15, 20, 30, 45, 60, 80, 100)
TOOL_CENTRE_M = 0.12
BOTTLE_HEIGHT_M = 0.765


@dataclass(frozen=True)
class Config:
    """Data, and the size of the fit."""

    train: tuple[Path, ...]
    """Directories of recorded episodes to fit on."""
    test: tuple[Path, ...]
    """Directories to report on."""
    initial_states: Path = Path("initial_states")
    """The sealed sets."""
    networks: int = 3
    """Networks whose logits are averaged."""
    steps: int = 600
    """Optimiser steps of each."""
    seed: int = 0
    """Of weights, batches and noise."""


def scenes(directory: Path) -> dict[str, dict[str, float]]:
    """The bottle's true pose by initial state id."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted(directory.glob("*/states.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            state = json.loads(line)
            found[state["initial_state_id"]] = state["scene"]
    return found


def features(poses: NDArray[np.float32], scene: dict[str, float]) -> NDArray[np.float32]:
    """The active hand relative to the bottle, mirrored to the right side; float32 (d,)."""
    right = scene["tag"] == 1
    side = 1.0 if right else -1.0
    arm = (poses[:, 10:] if right else poses[:, :10]).copy()
    flip = np.array([side, 1, 1, side, 1, 1, 1, side, side, 1], np.float32)
    arm *= flip
    place, ahead, aside, gripper = arm[:, :3], arm[:, 3:6], arm[:, 6:9], arm[:, 9]
    tool = place + TOOL_CENTRE_M * ahead
    yaw = scene["yaw_rad"] * side
    turn = np.array([[np.cos(yaw), np.sin(yaw), 0], [-np.sin(yaw), np.cos(yaw), 0], [0, 0, 1]])
    bottle = np.array([scene["x_m"] * side, scene["y_m"], BOTTLE_HEIGHT_M])
    closing = np.flatnonzero(gripper < 0.5)
    moment = int(closing[0]) if len(closing) else len(poses) - 1
    values = [moment / 100.0, float(len(closing) > 0), float(scene["bottle_model"] == 13)]
    for offset in OFFSETS:
        t = int(np.clip(moment + offset, 0, len(poses) - 1))
        values += [*(10.0 * (turn @ (tool[t] - bottle))), *(turn @ ahead[t]), *(turn @ aside[t]), gripper[t]]
    values += [*(3.0 * tool[-1]), *ahead[-1], *aside[-1], gripper[-1]]
    return np.array(values, np.float32)


def load(
    directories: Sequence[Path], where: dict[str, dict[str, float]]
) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
    """Features (n, d), success (n,), and the initial states they start from."""
    reader = EpisodeReader([str(directory) for directory in directories])
    rows, labels, states = [], [], set()
    for position, info in enumerate(reader.infos):
        if info.success is None or info.length != 201:
            continue
        rows.append(features(episode_poses(reader[position], "rotation_columns"), where[info.initial_state_id]))
        labels.append(float(info.success))
        states.add(info.initial_state_id)
    return torch.from_numpy(np.stack(rows)), torch.tensor(labels), states


def fit(x: torch.Tensor, y: torch.Tensor, config: Config, number: int) -> torch.nn.Module:
    """One network."""
    generator = torch.Generator().manual_seed(config.seed * 1000 + number)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed * 1000 + number)
        layers: list[torch.nn.Module] = []
        for inputs in (x.shape[1], 128):
            layers += [torch.nn.Linear(inputs, 128), torch.nn.SiLU(), torch.nn.Dropout(0.2)]
        network = torch.nn.Sequential(*layers, torch.nn.Linear(128, 1))
        optimizer = torch.optim.AdamW(network.parameters(), 2e-3, weight_decay=0.05)
        for _ in range(config.steps):
            rows = torch.randint(0, len(x), (128,), generator=generator)
            noise = 0.03 * torch.randn(128, x.shape[1], generator=generator)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(network(x[rows] + noise)[:, 0], y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network.eval()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object."""
    import tyro

    config = tyro.cli(Config, args=argv, description=__doc__)
    torch.set_num_threads(1)
    where = scenes(config.initial_states)
    x, y, trained = load(config.train, where)
    refuse_for_training(trained)
    test_x, test_y, tested = load(config.test, where)
    if trained & tested:
        print(f"geometry_reward: expected other initial states to test on; {len(trained & tested)} are shared")
        return 1
    mean, scale = x.mean(0), x.std(0) + 1e-3
    networks = [fit((x - mean) / scale, y, config, number) for number in range(config.networks)]
    with torch.no_grad():
        logits = torch.stack([network((test_x - mean) / scale)[:, 0] for network in networks]).mean(0)
    success, failure = logits[test_y == 1], logits[test_y == 0]
    result = {
        "train_episodes": len(y),
        "failures": len(failure),
        "successes": len(success),
        "fake_success": float((failure > 0).float().mean()),
        "recall": float((success > 0).float().mean()),
        "area_under_curve": area_under_curve(success.numpy(), failure.numpy()),
    }
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
