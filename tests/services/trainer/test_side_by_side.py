"""Videos of the same actions in two targets, drawn here by stand-ins that show what they were told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.policies import PolicySample
from services.trainer.side_by_side import choose_episodes, join_frames, load_videos, make_videos
from worldserve.episodes import read_video
from worldserve.messages import ResetItem, ResetReply, StepItem, StepReply, Verdict

CHUNK, CHUNKS = 5, 2


def rows(*outcomes: int) -> list[dict[str, Any]]:
    return [{"initial_state_id": f"s{n}", "evaluation_seed": 0, "success": value} for n, value in enumerate(outcomes)]


@pytest.mark.parametrize(
    ("outcomes", "count", "expected"),
    [
        ((1, 1, 0, 0, 1), 4, ["s0", "s1", "s2", "s3"]),
        ((1, 1, 1, 1, 0), 4, ["s0", "s1", "s2", "s4"]),
        ((0, 0, 0, 0, 1), 4, ["s4", "s0", "s1", "s2"]),
        ((1, 1, 1, 1, 1), 4, ["s0", "s1", "s2", "s3"]),
        ((0, 0, 0, 0, 0), 2, ["s0", "s1"]),
        ((0, 1), 1, ["s1"]),
        ((0,), 4, ["s0"]),
    ],
)
def test_successes_and_failures_are_shown_half_and_half(outcomes: tuple[int], count: int, expected: list[str]) -> None:
    assert [state for state, _ in choose_episodes(rows(*outcomes), count)] == expected


def test_frames_are_joined_left_and_right_at_twice_the_size() -> None:
    left, right = np.full((3, 4, 6, 3), 10, np.uint8), np.full((3, 4, 6, 3), 20, np.uint8)
    joined = join_frames(left, right)
    assert joined.shape == (3, 8, 2 * 12 + 8, 3)
    assert (joined[:, :, :12] == 10).all()
    assert (joined[:, :, 12:20] == 255).all()
    assert (joined[:, :, 20:] == 20).all()


def test_videos_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="right: expected frames of shape"):
        join_frames(np.zeros((3, 4, 6, 3), np.uint8), np.zeros((2, 4, 6, 3), np.uint8))


class Target:
    """Answers like a server whose frames are all of one grey; executes half of every action."""

    def __init__(self, grey: int, success: bool | None, peak: float) -> None:
        self.grey, self.success, self.peak = grey, success, peak
        self.resets: list[ResetItem] = []
        self.actions: list[Any] = []
        self.open: set[str] = set()

    def reset(self, items: Sequence[ResetItem]) -> list[Any]:
        self.resets += items
        self.open |= {item.episode_id for item in items}
        state = np.zeros(14, np.float32)
        return [
            ResetReply(i.episode_id, i.initial_state_id, i.seed, self._frames(1)[0], state, "lift it") for i in items
        ]

    def step(self, items: Sequence[StepItem]) -> list[Any]:
        return [self._step(item) for item in items]

    def close_episodes(self, episode_ids: Sequence[str]) -> None:
        self.open -= set(episode_ids)

    def _frames(self, count: int) -> Any:
        return np.full((count, 16, 16, 3), self.grey, np.uint8)

    def _step(self, item: StepItem) -> StepReply:
        self.actions.append(item.actions)
        first = item.chunk_index * CHUNK
        indices = item.frames.frame_indices(first, CHUNK)
        last = item.chunk_index == CHUNKS - 1
        return StepReply(
            episode_id=item.episode_id,
            committed_chunk_index=item.chunk_index,
            frames=self._frames(len(indices)),
            frame_indices=np.array(indices, np.int32),
            executed_actions=item.actions / 2,
            clipped_count=0,
            elapsed_steps=first + CHUNK,
            rewards=np.zeros(CHUNK, np.float32),
            terminated=last,
            truncated=False,
            end_reason="limit" if last else "",
            success=self.success,
            verdict=Verdict(self.peak > 0.5, self.peak, 7, 0.5) if last else None,
            proprioception=np.zeros(14, np.float32),
        )


def act(observation: Any, generators: Sequence[torch.Generator], mode: str) -> PolicySample:
    """Noise of each episode's generator, as a flow policy's initial noise is."""
    import dataclasses

    actions = torch.stack([torch.randn(CHUNK, 14, generator=generator) for generator in generators])
    names = [field.name for field in dataclasses.fields(PolicySample)]
    return PolicySample(**{name: actions if name == "actions" else torch.zeros(len(generators)) for name in names})


def test_the_executed_actions_run_in_the_world_model_from_the_same_state_and_seed(tmp_path: Path) -> None:
    simulator, world_model = Target(60, True, 0.9), Target(200, None, 0.25)
    policy = SimpleNamespace(act=act)
    [video] = make_videos(simulator, world_model, policy, [("s3", 0)], tmp_path, policy_batch=2)
    assert [(r.initial_state_id, r.seed) for r in world_model.resets] == [
        (r.initial_state_id, r.seed) for r in simulator.resets
    ]
    assert len(world_model.actions) == CHUNKS
    for ours, theirs in zip(world_model.actions, simulator.actions, strict=True):
        np.testing.assert_array_equal(ours, theirs / 2)
    assert (video.simulator_success, video.simulator_verdict, video.world_model_verdict) == (True, True, False)
    assert (video.simulator_peak, video.world_model_peak) == (0.9, 0.25)
    assert not simulator.open | world_model.open
    frames = read_video(tmp_path / video.video)
    assert frames.shape == (1 + CHUNK * CHUNKS, 32, 72, 3)
    assert abs(int(frames[-1, 16, 8, 0]) - 60) < 10
    assert abs(int(frames[-1, 16, 64, 0]) - 200) < 10


def test_videos_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    policy, episodes = SimpleNamespace(act=act), [("s3", 0), ("s4", 0)]
    made = make_videos(Target(60, True, 0.9), Target(200, None, 0.25), policy, episodes, tmp_path, policy_batch=2)
    idle = Target(0, None, 0.0)
    assert make_videos(idle, idle, policy, episodes, tmp_path, policy_batch=2) == made == load_videos(tmp_path)
    assert not idle.resets
