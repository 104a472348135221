"""Windows encoded once to latents, on disk as float16, and the batches that training draws from them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from services.wm_server import checkpoint
from services.wm_server.codec import SPATIAL_FACTOR, VideoCodec, emphasis_weights, to_float
from services.wm_server.windows import (
    CHUNK_FRAMES,
    CONDITION_LATENTS,
    GROUP_FRAMES,
    LATENT_FRAMES,
    WINDOW_FRAMES,
    PoseStatistics,
    build_window,
    conditioning_poses,
    mirror_poses,
)
from worldserve.episodes import Episode

FUTURE_LATENTS = LATENT_FRAMES - CONDITION_LATENTS


@dataclass(frozen=True)
class WindowChoice:
    """Which windows of an episode are encoded."""

    starts: tuple[int, ...] = (0, 50, 100, 150)
    """Frames before a window's future: those of the chunks, which serving meets."""
    random_starts: int = 1
    """Further windows an episode, at random places."""
    mirror: bool = True
    """Every window mirrored left to right too: twice the grasps (needs the pose format rotation_columns)."""
    moving_emphasis: float = 4.0
    """Extra loss weight of latents that show what moved."""
    coloured_emphasis: float = 16.0
    """Extra loss weight of latents that show what changed colour: in practice the bottle, its goal and where it lay."""


def episode_poses(episode: Episode, pose_format: str) -> NDArray[np.float32]:
    """Conditioning poses by frame number, float32 (201, dimensions), from the initial state and the executed targets."""
    targets = np.concatenate([episode.proprioception[:1], episode.executed_actions])
    return conditioning_poses(targets, pose_format)


def pose_statistics(episodes: Sequence[Episode], pose_format: str, mirror: bool) -> PoseStatistics:
    """Percentiles over (up to 300 of) the episodes; over both sides where windows are mirrored."""
    chosen = np.unique(np.linspace(0, len(episodes) - 1, min(300, len(episodes))).astype(int))
    poses = np.concatenate([episode_poses(episodes[int(position)], pose_format) for position in chosen])
    if mirror:
        poses = np.concatenate([poses, mirror_poses(poses)])
    return PoseStatistics.of(poses)


def window_weights(pixels: Tensor, choice: WindowChoice) -> Tensor:
    """Loss weights of future latents (13, height/16, width/16) from a window's pixels, 1 where nothing moved."""
    groups = pixels[1:].unflatten(0, (-1, GROUP_FRAMES))[CONDITION_LATENTS - 1 :]
    reference = pixels[:1].expand(len(groups), -1, -1, -1)
    weights = emphasis_weights(groups, reference, choice.moving_emphasis, choice.coloured_emphasis)
    return F.avg_pool2d(weights.mean(1), SPATIAL_FACTOR)[:, 0]


@torch.inference_mode()
def encode_windows(
    episodes: Sequence[Episode],
    codec: VideoCodec,
    statistics: PoseStatistics,
    choice: WindowChoice,
    pose_format: str,
    out: Path,
    seed: int,
    key: Mapping[str, Any],
) -> LatentWindows:
    """Encodes windows of all episodes into `out`, once: what is there with the same `key` is opened and returned."""
    from rich.progress import track

    key = {**key, "choice": choice.__dict__, "pose_format": pose_format, "seed": seed, "episodes": len(episodes)}
    key = json.loads(json.dumps(key, default=str))
    if (out / "index.json").exists():
        there = json.loads((out / "index.json").read_text(encoding="utf-8"))
        if there["key"] == key:
            return LatentWindows(out)
    staging = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    copies = 2 if choice.mirror else 1
    total = len(episodes) * (len(choice.starts) + choice.random_starts) * copies
    arrays: dict[str, NDArray[Any]] = {}
    try:
        for position in track(range(len(episodes)), description="latents", transient=True):
            episode = episodes[position]
            frames, poses = episode.frames, episode_poses(episode, pose_format)
            random = np.random.default_rng([seed, 3, position])
            last = len(frames) - 1 - CHUNK_FRAMES
            starts = [*choice.starts, *random.integers(1, last, size=choice.random_starts).tolist()]
            for mirrored in (False, True)[:copies]:
                shown = frames[:, :, ::-1] if mirrored else frames
                moved = mirror_poses(poses) if mirrored else poses
                for start in starts:
                    window = build_window(shown, moved, start, statistics, future=True)
                    pixels = to_float(torch.from_numpy(np.ascontiguousarray(window.pixels)))
                    values = {
                        "latents": codec.encode(pixels[None])[0].numpy().astype(np.float16),
                        "weights": window_weights(pixels, choice).numpy().astype(np.float16),
                        "conditioning": window.conditioning,
                    }
                    for name, value in values.items():
                        if name not in arrays:
                            path, shape = str(staging / f"{name}.npy"), (total, *value.shape)
                            arrays[name] = np.lib.format.open_memmap(path, "w+", value.dtype, shape)  # type: ignore[no-untyped-call]
                        arrays[name][len(rows)] = value
                    facts = {"episode_id": episode.episode_id, "initial_state_id": episode.initial_state_id}
                    rows.append({**facts, "t": start, "mirrored": mirrored, "success": episode.success})
        arrays.clear()
        checkpoint.write_json(staging / "index.json", {"key": key, "rows": rows})
        shutil.rmtree(out, ignore_errors=True)
        os.replace(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return LatentWindows(out)


@dataclass(frozen=True)
class Batch:
    """`latents` (n, channels, 16, h, w), `weights` (n, 13, h, w), `conditioning` (n, 61, d), all float32."""

    latents: Tensor
    weights: Tensor
    conditioning: Tensor


class LatentWindows:
    """Encoded windows, opened from a directory of `encode_windows`."""

    def __init__(self, directory: Path) -> None:
        index = json.loads((directory / "index.json").read_text(encoding="utf-8"))
        self.rows: list[dict[str, Any]] = index["rows"]
        self._latents = np.load(directory / "latents.npy", mmap_mode="r")
        self._weights = np.load(directory / "weights.npy", mmap_mode="r")
        self._conditioning = np.load(directory / "conditioning.npy", mmap_mode="r")
        expected = (WINDOW_FRAMES, len(self.rows))
        if (self._conditioning.shape[1], len(self._latents)) != expected:
            raise ValueError(f"{directory}: expected (frames, windows) {expected}; encode the windows again")

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> Batch:
        """The windows `rows`."""
        order = np.asarray(rows)
        return Batch(
            torch.from_numpy(self._latents[order].astype(np.float32)),
            torch.from_numpy(self._weights[order].astype(np.float32)),
            torch.from_numpy(self._conditioning[order]),
        )

    def probabilities(self, start_weights: Mapping[int, float], failure_fraction: float | None) -> NDArray[np.float64]:
        """How often each window is drawn.

        Args:
            start_weights: share of the windows at frame 0, 50, ...; -1 for those at random places.
            failure_fraction: share of windows from failed episodes, where both kinds are there; None as they come.
        """
        starts = np.array([row["t"] if row["t"] in start_weights else -1 for row in self.rows])
        shares = np.array([start_weights.get(int(start), 0.0) for start in starts])
        failed = np.array([row["success"] is False for row in self.rows])
        result = np.zeros(len(self.rows))
        for start in set(starts.tolist()):
            here = starts == start
            if failure_fraction is None or failed[here].all() or not failed[here].any():
                result[here] = shares[here] / here.sum()
                continue
            for group, share in ((here & failed, failure_fraction), (here & ~failed, 1.0 - failure_fraction)):
                result[group] = shares[group] * share / group.sum()
        if not result.sum() > 0.0:
            raise ValueError(f"start_weights: expected a share for one of {sorted(set(starts.tolist()))}; got none")
        return result / result.sum()
