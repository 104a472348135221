"""One recorded episode: what was asked, what was executed, what was seen, and how it was judged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worldserve.contract import Contract
from worldserve.episodes.video import VideoFrames
from worldserve.messages import Verdict


@dataclass(frozen=True, kw_only=True)
class Episode:
    """An episode of n actions and n + 1 frames; frame k shows the world after action k.

    Attributes:
        episode_id: the client's name for it, once per data set.
        initial_state_id: the scene, for example "adjust_bottle/train/0007".
        seed: the world model's noise seed.
        instruction: what the policy was told.
        requested_actions: float32 (n, dimensions), as the policy sent them; finite.
        executed_actions: float32 (n, dimensions), as the backend ran them; finite.
        proprioception: float32 (n + 1, dimensions), the state reported with each frame; finite.
        rewards: float32 (n,), `rewards[k]` for action k + 1; finite.
        success: the simulator's ground truth; None where the backend knows none.
        verdict: the reward model's judgement; None where there was none.
        end_reason: "limit", or "" for an episode cut off before its end.
        terminated, truncated: the flags of the last step.
        clipped_count: how many requested values were out of range.
        policy_name, policy_sha256: what chose the actions.
        contract: of the backend that ran them; None for data from elsewhere.
        metadata: anything else, of JSON values (expert noise, scene, provenance of foreign data).
        frame_source: uint8 (n + 1, height, width, 3) RGB, or a recorded video; None where no frames were kept.
    """

    episode_id: str
    initial_state_id: str
    seed: int
    instruction: str
    requested_actions: NDArray[np.float32]
    executed_actions: NDArray[np.float32]
    proprioception: NDArray[np.float32]
    rewards: NDArray[np.float32]
    success: bool | None = None
    verdict: Verdict | None = None
    end_reason: str = "limit"
    terminated: bool = True
    truncated: bool = False
    clipped_count: int = 0
    policy_name: str = ""
    policy_sha256: str = ""
    contract: Contract | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    frame_source: NDArray[np.uint8] | VideoFrames | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.episode_id:
            raise ValueError("episode_id: expected a non-empty name; got ''")
        actions = self.executed_actions
        if actions.ndim != 2 or not actions.shape[0] or not actions.shape[1]:
            raise ValueError(f"executed_actions: expected (n >= 1, dimensions); got {actions.shape}")
        count, dimensions = actions.shape
        _check("executed_actions", actions, (count, dimensions))
        _check("requested_actions", self.requested_actions, (count, dimensions))
        _check("proprioception", self.proprioception, (count + 1, dimensions))
        _check("rewards", self.rewards, (count,))
        if self.verdict is not None and not np.isfinite([self.verdict.peak, self.verdict.threshold]).all():
            raise ValueError(f"verdict: expected finite peak and threshold; got {self.verdict}")
        source = self.frame_source
        if source is not None:
            if isinstance(source, np.ndarray) and source.dtype != np.uint8:
                raise ValueError(f"frames: expected uint8; got {source.dtype}")
            if len(source.shape) != 4 or source.shape[0] != count + 1 or source.shape[3] != 3:
                raise ValueError(
                    f"frames: expected ({count + 1}, height, width, 3), one more than actions; got {source.shape}"
                )
        try:
            json.dumps(dict(self.metadata), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"metadata: expected JSON values, numbers finite; {error}") from error

    @property
    def action_count(self) -> int:
        """n, one less than the frames."""
        return len(self.executed_actions)

    @property
    def total_reward(self) -> float:
        """Sum of the rewards."""
        return float(self.rewards.sum(dtype=np.float64))

    @property
    def frames(self) -> NDArray[np.uint8]:
        """All frames, uint8 (n + 1, height, width, 3). Decoded at every access: keep what you need."""
        source = self._source()
        return source if isinstance(source, np.ndarray) else source.read()

    def frames_at(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.uint8]:
        """The frames `indices` (0..n, any order), uint8 (len(indices), height, width, 3)."""
        source = self._source()
        if isinstance(source, VideoFrames):
            return source.at(indices)
        wanted = np.asarray(indices, dtype=np.int64).reshape(-1)
        out_of_range = wanted[(wanted < 0) | (wanted >= len(source))]
        if out_of_range.size:
            raise IndexError(f"frame index: expected 0..{len(source) - 1}; got {int(out_of_range[0])}")
        return source[wanted]

    def _source(self) -> NDArray[np.uint8] | VideoFrames:
        if self.frame_source is None:
            raise ValueError(
                f"episode {self.episode_id!r} was recorded without frames; record it with frames, or replay it"
            )
        return self.frame_source


@dataclass(frozen=True, kw_only=True)
class EpisodeInfo:
    """An episode without its arrays: one line of `meta/episodes.jsonl`. Fields as in `Episode`."""

    episode_index: int
    episode_id: str
    initial_state_id: str
    seed: int
    instruction: str
    length: int
    success: bool | None
    verdict: Verdict | None
    end_reason: str
    terminated: bool
    truncated: bool
    total_reward: float
    clipped_count: int
    policy_name: str
    policy_sha256: str
    interface_fingerprint: str
    provenance_fingerprint: str
    frames_sha256: str
    metadata: Mapping[str, Any]


def frames_sha256(frames: NDArray[np.uint8]) -> str:
    """SHA-256 over the pixels of frames 0..n in order, as in `ReplayOutcome`: equal hashes are equal bytes."""
    return hashlib.sha256(np.ascontiguousarray(frames).data).hexdigest()


def _check(name: str, values: NDArray[np.float32], shape: tuple[int, ...]) -> None:
    if values.dtype != np.float32:
        raise ValueError(
            f"{name}: expected float32, which is what a backend runs; got {values.dtype}; convert it first"
        )
    if values.shape != shape:
        raise ValueError(f"{name}: expected {shape}; got {values.shape}")
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        where = tuple(int(axis) for axis in bad[0])
        raise ValueError(f"{name}: expected finite numbers; got {values[where]} at {where} ({len(bad)} in all)")
