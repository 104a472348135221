"""A world that shows its outcome as brightness, one that draws it wrong, and a reward, behind real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.worldserve.serving.conftest import StubBackend, StubScorer
from worldserve.contract import (
    Contract,
    FrameConvention,
    Observation,
    RewardRule,
    TerminationRule,
    Timing,
    adjust_bottle,
)
from worldserve.episodes import Episode
from worldserve.messages import BackendChunk, BackendStep, ItemError, ResetItem, ResetReply
from worldserve.serving import ServerSettings, errors, start_environment_server, start_reward_server

DARK, BRIGHT = 50, 200  # StubScorer: 0.2 and 0.8 against a threshold of 0.5
# (initial state, success): three states, two of them with both outcomes.
EPISODES = [(0, True), (0, False), (1, False), (1, False), (1, True), (2, True)]


def state_id(number: int) -> str:
    return f"adjust_bottle/train/{number:04d}"


def contract(kind: str, **facts: str) -> Contract:
    """Small frames and short episodes: four chunks of five actions, of which the reward reads frames 6 to 20."""
    found = adjust_bottle(kind, "stub", facts)
    interface = dataclasses.replace(
        found.interface,
        timing=Timing(chunk_actions=5),
        observation=Observation(height=16, width=16),
        frames=FrameConvention(frames_per_episode=21),
        termination=TerminationRule(limit_actions=20),
        reward=RewardRule(first_frame=6, last_frame=20),
    )
    return dataclasses.replace(found, interface=interface)


def constant(value: float) -> np.ndarray:
    """The actions of an episode, float32 (20, 14)."""
    actions = np.full((20, 14), value, np.float32)
    actions[:, [6, 13]] = 1.0
    return actions


@dataclass
class World(StubBackend):
    """Shows brightness BRIGHT from frame 16 on where the actions succeed, or where `fooled` names the episode's seed.

    The last action's first number decides; the last chunk's frames show it. A world model (`knows` false) tells no
    success. `refused` holds seeds that cannot be reset.
    """

    capacity: int = 64
    fooled: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    knows: bool = True

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        replies: list[ResetReply | ItemError] = []
        for item in items:
            self.resets.append(item.episode_id)
            if item.seed in self.refused:
                replies.append(errors.initial_state_unknown("initial_state_id", item.initial_state_id, "another"))
                continue
            self.seeds = {**getattr(self, "seeds", {}), item.episode_id: item.seed}
            state = constant(0.0)[0]
            shown = frames_of(False, [0])[0]
            replies.append(ResetReply(item.episode_id, item.initial_state_id, item.seed, shown, state, "lift it"))
        return replies

    def step(self, items: Sequence[BackendStep]) -> list[BackendChunk | ItemError]:
        outcomes: list[BackendChunk | ItemError] = []
        for item in items:
            self.runs.append((item.episode_id, item.chunk_index))
            seed, success = self.seeds[item.episode_id], bool(item.actions[-1, 0] > 0)
            bright = (success or seed in self.fooled) and seed not in self.missed
            outcomes.append(BackendChunk(frames_of(bright, item.frame_indices), success if self.knows else None))
        return outcomes


def frames_of(bright: bool, indices: Sequence[int]) -> np.ndarray:
    """Grey frames: dark until frame 15, then bright where the episode succeeds."""
    frames = np.full((len(indices), 16, 16, 3), DARK, np.uint8)
    for frame, index in zip(frames, indices):
        if index > 15 and bright:
            frame[:] = BRIGHT
    return frames


def episode(number: int, state: int, succeeds: bool, **changes: Any) -> Episode:
    actions = constant(0.01 if succeeds else -0.01)
    values: dict[str, Any] = {
        "episode_id": f"recorded/{number}",
        "initial_state_id": state_id(state),
        "seed": number,
        "instruction": "lift it",
        "requested_actions": actions,
        "executed_actions": actions,
        "proprioception": np.concatenate([actions[:1], actions]),
        "rewards": np.zeros(20, np.float32),
        "success": succeeds,
        "contract": contract("simulator"),
        "frame_source": frames_of(succeeds, range(21)),
    }
    return Episode(**(values | changes))


@dataclass
class Servers:
    """A simulator, a world model and a reward, and the command line that names them."""

    simulator: World
    model: World
    scorer: StubScorer
    addresses: dict[str, str]

    def flags(self, data: Path, out: Path, *more: str) -> list[str]:
        named = ["--target", self.addresses["model"], "--reward", self.addresses["reward"]]
        return [str(data), *named, "--out", str(out), "--batch", "4", *more]


@contextlib.contextmanager
def serving(**model: Any) -> Iterator[Servers]:
    simulator = World(contract=contract("simulator"))
    drawn = World(**({"contract": contract("world_model", weights_sha256="abc"), "knows": False} | model))
    scorer = StubScorer(contract=contract("reward_model"))
    running = {
        "simulator": start_environment_server(simulator, None, ServerSettings()),
        "model": start_environment_server(drawn, None, ServerSettings()),
        "reward": start_reward_server(scorer, ServerSettings()),
    }
    try:
        yield Servers(simulator, drawn, scorer, {name: server.address for name, server in running.items()})
    finally:
        for server in running.values():
            server.stop(0)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]


def result(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())
