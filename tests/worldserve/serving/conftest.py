"""Real servers on loopback over a small deterministic world, for all tests of the wire."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from worldserve.client import EnvironmentClient
from worldserve.contract import Contract, adjust_bottle
from worldserve.messages import BackendChunk, BackendStep, ItemError, ResetItem, ResetReply
from worldserve.serving import RunningServer, ServerSettings, errors, start_environment_server, start_reward_server

KNOWN_STATE = "adjust_bottle/train/0000"


def frame(seed: int, index: int) -> np.ndarray:
    """Frame `index` of a world: constant, and different for each seed and index."""
    return np.full((96, 128, 3), (seed * 7 + index) % 251, np.uint8)


@dataclass
class StubBackend:
    """A world whose frames are numbers. It succeeds when the first executed number of the last action is positive."""

    capacity: int = 4
    contract: Contract = field(default_factory=lambda: adjust_bottle("simulator", "stub", {}))
    runs: list[tuple[str, int]] = field(default_factory=list)
    resets: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    gate: threading.Event | None = None

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        replies: list[ResetReply | ItemError] = []
        for item in items:
            self.resets.append(item.episode_id)
            if item.initial_state_id != KNOWN_STATE:
                replies.append(errors.initial_state_unknown("initial_state_id", item.initial_state_id, KNOWN_STATE))
                continue
            state = np.zeros(14, np.float32)
            state[[6, 13]] = 1.0
            replies.append(
                ResetReply(item.episode_id, item.initial_state_id, item.seed, frame(item.seed, 0), state, "lift it")
            )
            self.seeds = {**getattr(self, "seeds", {}), item.episode_id: item.seed}
        return replies

    def step(self, items: Sequence[BackendStep]) -> list[BackendChunk | ItemError]:
        if self.gate is not None:
            self.gate.wait(10)
        outcomes: list[BackendChunk | ItemError] = []
        for item in items:
            self.runs.append((item.episode_id, item.chunk_index))
            if item.episode_id in self.broken:
                outcomes.append(errors.not_finite("frames", "pixels"))
                continue
            seed = self.seeds[item.episode_id]
            frames = [frame(seed, index) for index in item.frame_indices]
            stacked = np.stack(frames) if frames else np.zeros((0, 96, 128, 3), np.uint8)
            outcomes.append(BackendChunk(stacked, bool(item.actions[-1, 0] > 0)))
        return outcomes

    def close_episodes(self, episode_ids: Sequence[str]) -> None:
        self.closed += episode_ids

    def shutdown(self) -> None:
        pass


@dataclass
class StubScorer:
    """Probability: the frame's mean over 250."""

    contract: Contract = field(default_factory=lambda: adjust_bottle("reward_model", "stub", {}))
    threshold: float = 0.5
    broken: bool = False

    def probabilities(self, frames: np.ndarray) -> np.ndarray:
        if self.broken:
            return np.full(len(frames), np.nan, np.float32)
        return (frames.mean((1, 2, 3)) / 250).astype(np.float32)


def chunk(value: float = 0.1) -> np.ndarray:
    """A chunk whose every number lies within the limits and moves slowly."""
    actions = np.full((50, 14), value, np.float32)
    actions[:, [6, 13]] = 1.0
    return actions


@pytest.fixture
def backend() -> StubBackend:
    return StubBackend()


@pytest.fixture
def server(backend: StubBackend) -> Iterator[RunningServer]:
    running = start_environment_server(backend, None, ServerSettings())
    yield running
    running.stop(0)


@pytest.fixture
def client(server: RunningServer) -> Iterator[EnvironmentClient]:
    with EnvironmentClient(server.address, timeout_s=20) as connected:
        yield connected


@pytest.fixture
def scorer() -> StubScorer:
    return StubScorer()


@pytest.fixture
def reward_server(scorer: StubScorer) -> Iterator[RunningServer]:
    running = start_reward_server(scorer, ServerSettings())
    yield running
    running.stop(0)
