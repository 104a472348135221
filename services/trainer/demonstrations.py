"""Demonstrations in memory: what imitation learning reads of recorded episodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.trainer.policies import PolicyObservation


@dataclass(frozen=True)
class DemonstrationArrays:
    """N episodes of T actions, the same T in all.

    frames: uint8 (N, T / stride + 1, H, W, 3), frame k after action k * stride (a memory map will do). states: float32
    (N, T + 1, D), the proprioception at each frame. actions: float32 (N, T, D), executed targets; actions[:, k] leads
    from frame k to k + 1. instructions: N strings. episode_ids: N names, for the record.
    """

    frames: NDArray[np.uint8]
    states: NDArray[np.float32]
    actions: NDArray[np.float32]
    instructions: Sequence[str]
    episode_ids: Sequence[str]
    stride: int = 1

    def __post_init__(self) -> None:
        count, steps = self.actions.shape[:2]
        if self.stride < 1 or steps % self.stride:
            raise ValueError(f"demonstrations.stride: expected a divisor of {steps} actions; got {self.stride}")
        expected = {
            "frames": (self.frames.shape[:2], (count, steps // self.stride + 1)),
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
            self.stride,
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
    """Pairs (frame t, state t) with actions t + 1 .. t + chunk of each episode and t; past the end the last repeats.

    Every t is a multiple of `demonstrations.stride`.
    """
    index = starts[:, None] + np.arange(chunk)[None]
    padded = index >= demonstrations.steps
    actions = demonstrations.actions[episodes[:, None], np.minimum(index, demonstrations.steps - 1)]
    observation = PolicyObservation(
        torch.from_numpy(np.ascontiguousarray(demonstrations.frames[episodes, starts // demonstrations.stride])),
        torch.from_numpy(demonstrations.states[episodes, starts].astype(np.float32)),
        [demonstrations.instructions[episode] for episode in episodes],
    )
    return ChunkBatch(observation, torch.from_numpy(actions.astype(np.float32)), torch.from_numpy(padded))


def draw_batch(
    demonstrations: DemonstrationArrays,
    size: int,
    chunk: int,
    first_share: float,
    decision_share: float,
    random: np.random.Generator,
) -> ChunkBatch:
    """`size` pairs with replacement.

    A share of them starts at action 0, a share where a deployed policy decides (0, chunk, 2 chunk, ...), and the others
    anywhere.
    """
    episodes = random.integers(0, len(demonstrations), size)
    anywhere = random.integers(0, demonstrations.steps // demonstrations.stride, size) * demonstrations.stride
    decisions = random.integers(0, demonstrations.steps // chunk, size) * chunk
    share = random.random(size)
    starts = np.where(share < first_share + decision_share, decisions, anywhere)
    starts = np.where(share < first_share, 0, starts)
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


@dataclass(frozen=True)
class LoadedDemonstrations:
    """Arrays, and where they come from as JSON values (for cards)."""

    arrays: DemonstrationArrays
    card: dict[str, Any] = field(default_factory=dict)


def choose_successes(success: Sequence[bool], every: int) -> list[int]:
    """Positions of the first successful episode and every `every`-th successful one after it."""
    return [position for position, succeeded in enumerate(success) if succeeded][::every]


def load_demonstrations(
    directory: Path, count: int, stride: int, every: int = 1, progress: Callable[[], object] = lambda: None
) -> LoadedDemonstrations:
    """The first `count` of every `every`-th successful episode of a directory, every `stride`-th frame decoded.

    Raises:
        ValueError: for too few successes, episodes of different lengths or interfaces, or without frames.
        SealedStateError: for an episode from a sealed test state.
    """
    from worldserve.episodes import EpisodeReader, refuse_for_training

    reader = EpisodeReader(directory)
    chosen = choose_successes([bool(info.success) for info in reader.infos], every)[:count]
    if len(chosen) < count:
        raise ValueError(
            f"{directory}: expected {count} successful episodes (training and validation, every {every}); got "
            f"{len(chosen)} of {len(reader.infos)} recorded. Record more, or ask for fewer with --demonstrations."
        )
    infos = [reader.infos[position] for position in chosen]
    refuse_for_training(info.initial_state_id for info in infos)
    for name in ("length", "interface_fingerprint"):
        if len(found := {getattr(info, name) for info in infos}) > 1:
            raise ValueError(f"{directory}: expected episodes of one {name}; got {sorted(found)}")
    frames, states, actions = [], [], []
    for position in chosen:
        episode = reader[position]
        if episode.action_count % stride:
            raise ValueError(f"frame_stride: expected a divisor of {episode.action_count} actions; got {stride}")
        frames.append(episode.frames_at(range(0, episode.action_count + 1, stride)))
        states.append(episode.proprioception)
        actions.append(episode.executed_actions)
        progress()
    arrays = DemonstrationArrays(
        np.stack(frames),
        np.stack(states),
        np.stack(actions),
        [info.instruction for info in infos],
        [info.episode_id for info in infos],
        stride,
    )
    hashes = hashlib.sha256("".join(info.frames_sha256 for info in infos).encode()).hexdigest()
    card = {
        "directory": str(directory),
        "episodes": len(infos),
        "first_episode": infos[0].episode_id,
        "last_episode": infos[-1].episode_id,
        "frames_sha256": hashes,
        "interface_fingerprint": infos[0].interface_fingerprint,
        "policy": sorted({info.policy_name for info in infos}),
    }
    return LoadedDemonstrations(arrays, card)
