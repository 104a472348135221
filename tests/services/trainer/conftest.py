"""A tiny policy, a bandit that stands in for a client, and a stub backend behind a real socket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from services.trainer.policies import FlowPolicy, FlowPolicyConfig
from tests.worldserve.serving.conftest import StubBackend
from worldserve.messages import ItemError, ResetItem, ResetReply, StepItem, StepReply, Verdict
from worldserve.serving import RunningServer, ServerSettings, start_environment_server

CHUNKS = 2


def item_error(code: str) -> ItemError:
    """An error of a status, with filler for the rest."""
    return ItemError(code, "REASON", "item", "a served item", "an error", "try again")


class Bandit:
    """Episodes of two chunks; success when the first joint's mean over the episode exceeds `threshold`.

    Frames name the state and the chunk, so that mixed-up rows would be seen. `unavailable` maps an episode's number
    (the last part of its id) to how many of its Steps fail first; `fail_after_resets` breaks the connection.
    """

    def __init__(
        self,
        threshold: float = 0.0,
        unavailable: dict[int, int] | None = None,
        fail_after_resets: int | None = None,
        gives_success: bool = True,
        code: str = "UNAVAILABLE",
    ) -> None:
        self.threshold, self.unavailable = threshold, dict(unavailable or {})
        self.fail_after_resets, self.gives_success, self.code = fail_after_resets, gives_success, code
        self.open_episodes: set[str] = set()
        self.resets: list[ResetItem] = []
        self.steps: list[StepItem] = []
        self._state: dict[str, tuple[str, int]] = {}
        self._total: dict[str, float] = {}
        self._lock = threading.Lock()

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        with self._lock:
            return [self._reset(item) for item in items]

    def _reset(self, item: ResetItem) -> ResetReply:
        if self.fail_after_resets is not None and len(self.resets) >= self.fail_after_resets:
            raise ConnectionError("the server went away")
        self.resets.append(item)
        self.open_episodes.add(item.episode_id)
        self._state[item.episode_id], self._total[item.episode_id] = (item.initial_state_id, 0), 0.0
        frame = self.frame(item.initial_state_id, 0)
        return ResetReply(item.episode_id, item.initial_state_id, item.seed, frame, np.zeros(14, np.float32), "go")

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        with self._lock:
            return [self._step(item) for item in items]

    def _step(self, item: StepItem) -> StepReply | ItemError:
        number = int(item.episode_id.rsplit("/", 1)[1])
        if self.unavailable.get(number, 0) > 0:
            self.unavailable[number] -= 1
            return item_error(self.code)
        self.steps.append(item)
        state, chunk = self._state[item.episode_id]
        assert item.chunk_index == chunk, "chunks come in order"
        assert item.actions.dtype == np.float32
        self._state[item.episode_id] = (state, chunk + 1)
        self._total[item.episode_id] += float(item.actions[:, 0].mean())
        last = chunk + 1 == CHUNKS
        success = self._total[item.episode_id] / CHUNKS > self.threshold
        count = len(item.actions)
        indices = item.frames.frame_indices(chunk * count, count)
        return StepReply(
            episode_id=item.episode_id,
            committed_chunk_index=chunk,
            frames=np.stack([self.frame(state, index) for index in indices]),
            frame_indices=np.array(indices, np.int32),
            executed_actions=item.actions.clip(-1, 1),
            clipped_count=int((np.abs(item.actions) > 1).sum()),
            elapsed_steps=(chunk + 1) * count,
            rewards=np.zeros(count, np.float32),
            terminated=last,
            truncated=False,
            end_reason="limit" if last else "",
            success=success if self.gives_success else None,
            verdict=Verdict(success, 0.5, 60, 0.4) if last else None,
            proprioception=item.actions[-1],
        )

    def close_episodes(self, episode_ids: Sequence[str]) -> None:
        self.open_episodes -= set(episode_ids)

    @staticmethod
    def frame(state: str, index: int) -> np.ndarray:
        return np.full((16, 16, 3), (int(state.rsplit("/", 1)[1]) * 7 + index) % 256, np.uint8)


@pytest.fixture
def server() -> Iterator[RunningServer]:
    """An environment server without a judge, over a real socket."""
    running = start_environment_server(StubBackend(), None, ServerSettings())
    yield running
    running.stop(0)


@pytest.fixture
def bandit() -> type[Bandit]:
    """The class; call it to get a fresh server."""
    return Bandit


@pytest.fixture
def tiny_policy() -> Callable[[], FlowPolicy]:
    """Makes the same small policy every time."""
    torch.set_num_threads(1)
    config = FlowPolicyConfig(
        image_height=16, image_width=16, chunk_actions=10, actions_per_token=5, patch_size=8, vision_width=16,
        vision_heads=2, vision_mlp_width=16, prefix_width=16, prefix_mlp_width=16, expert_width=16, expert_mlp_width=32,
        layers=1, heads=2, key_value_heads=2, head_width=8, instruction_tokens=2, instruction_vocabulary=8,
        denoise_steps=2, noise_steps=(0, 1), value_width=8,
    )  # fmt: skip
    return lambda: FlowPolicy(config, seed=0)
