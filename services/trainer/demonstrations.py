"""Demonstrations in memory: what imitation learning reads of recorded episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.trainer.policies import PolicyObservation


@dataclass(frozen=True)
class DemonstrationArrays:
    """N episodes of T actions, the same T in all.

    frames: uint8 (N, T + 1, H, W, 3), frame k after action k (a memory map will do). states: float32 (N, T + 1, D),
    the proprioception at each frame. actions: float32 (N, T, D), executed targets; actions[:, k] leads from frame k to
    k + 1. instructions: N strings. episode_ids: N names, for the record.
    """

    frames: NDArray[np.uint8]
    states: NDArray[np.float32]
    actions: NDArray[np.float32]
    instructions: Sequence[str]
    episode_ids: Sequence[str]

    def __post_init__(self) -> None:
        count, steps = self.actions.shape[:2]
        expected = {
            "frames": (self.frames.shape[:2], (count, steps + 1)),
            "states": (self.states.shape, (count, steps + 1, self.actions.shape[2])),
            "instructions": ((len(self.instructions),), (count,)),
            "episode_ids": ((len(self.episode_ids),), (count,)),
        }
        for name, (got, wanted) in expected.items():
            if tuple(got) != tuple(wanted):
                raise ValueError(
                    f"demonstrations.{name}: expected shape {wanted} for actions {(count, steps)}; got {got}"
                )
        for name, value in [("states", self.states), ("actions", self.actions)]:
            if not np.isfinite(value).all():
                raise ValueError(f"demonstrations.{name}: expected finite numbers; got NaN or infinity")

    def __len__(self) -> int:
        return len(self.instructions)

    @property
    def steps(self) -> int:
        """Actions an episode, T."""
        return self.actions.shape[1]

    def subset(self, start: int, stop: int) -> DemonstrationArrays:
        """Episodes start..stop - 1."""
        return DemonstrationArrays(
            self.frames[start:stop],
            self.states[start:stop],
            self.actions[start:stop],
            self.instructions[start:stop],
            self.episode_ids[start:stop],
        )


@dataclass(frozen=True)
class ChunkBatch:
    """Training pairs: an observation, the actions that followed it (B, chunk, D), and which of those are padding."""

    observation: PolicyObservation
    actions: torch.Tensor
    action_is_pad: torch.Tensor


def chunk_batch(
    demonstrations: DemonstrationArrays, episodes: NDArray[np.int64], starts: NDArray[np.int64], chunk: int
) -> ChunkBatch:
    """Pairs (frame t, state t) with actions t + 1 .. t + chunk of each episode and t; past the end the last repeats."""
    index = starts[:, None] + np.arange(chunk)[None]
    padded = index >= demonstrations.steps
    actions = demonstrations.actions[episodes[:, None], np.minimum(index, demonstrations.steps - 1)]
    observation = PolicyObservation(
        torch.from_numpy(np.ascontiguousarray(demonstrations.frames[episodes, starts])),
        torch.from_numpy(demonstrations.states[episodes, starts].astype(np.float32)),
        [demonstrations.instructions[episode] for episode in episodes],
    )
    return ChunkBatch(observation, torch.from_numpy(actions.astype(np.float32)), torch.from_numpy(padded))


def draw_batch(
    demonstrations: DemonstrationArrays,
    size: int,
    chunk: int,
    boundary_share: float,
    random: np.random.Generator,
) -> ChunkBatch:
    """`size` pairs with replacement.

    A share of them starts where a deployed policy decides (0, chunk, 2 chunk, ...); the others start anywhere.
    """
    episodes = random.integers(0, len(demonstrations), size)
    anywhere = random.integers(0, demonstrations.steps, size)
    decisions = random.integers(0, demonstrations.steps // chunk, size) * chunk
    starts = np.where(random.random(size) < boundary_share, decisions, anywhere)
    return chunk_batch(demonstrations, episodes, starts, chunk)


def action_statistics(
    demonstrations: DemonstrationArrays, chunk: int, grippers: Sequence[int], floor: float = 0.02
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the state, and of actions relative to the state their chunk starts in.

    Over chunks from every t whose `chunk` actions all exist. Deviations have a floor (radians, gripper fraction): a
    joint that never moves must not turn rounding into signal. The order is that of `FlowPolicy.set_statistics`.
    """
    states = demonstrations.states[:, : demonstrations.steps - chunk + 1]
    delta = np.ones(states.shape[2], np.float32)
    delta[list(grippers)] = 0.0
    windows = np.lib.stride_tricks.sliding_window_view(demonstrations.actions, chunk, axis=1)  # (N, t, D, chunk)
    relative = windows - (states * delta)[..., None]
    mean, std = relative.mean(axis=(0, 1, 3), dtype=np.float64), relative.std(axis=(0, 1, 3), dtype=np.float64)
    state_mean, state_std = states.mean(axis=(0, 1), dtype=np.float64), states.std(axis=(0, 1), dtype=np.float64)
    arrays = [state_mean, np.maximum(state_std, floor), mean, np.maximum(std, floor)]
    state_mean_, state_std_, mean_, std_ = (torch.from_numpy(value.astype(np.float32)) for value in arrays)
    return state_mean_, state_std_, mean_, std_
