"""Imports RoboTwin demonstrations of the layout that Boundless-World-Model publishes.

That layout: `observation.state` and `action` have 26 numbers a row, left arm first: joints 1-6 [rad], gripper open
fraction, end effector x y z [m], Euler x y z [rad]; then the right arm. `observation.state[t]` is reached at frame t;
an action's joints are the difference to the next frame, its grippers are absolute. Ours are absolute in both.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worldserve.episodes.episode import Episode
from worldserve.episodes.lazy import require
from worldserve.episodes.video import read_video, resized
from worldserve.episodes.writer import EpisodeWriter

_JOINTS = [*range(0, 6), *range(13, 19)]
_GRIPPERS = [6, 19]
# Where those go among our 14: left j1-6, left gripper, right j1-6, right gripper.
_JOINTS_14 = [*range(0, 6), *range(7, 13)]
_GRIPPERS_14 = [6, 13]
# float32 rounding of a sum of two angles; anything more means that the rows are not what this importer takes them for.
_TOLERANCE = 1e-5


def import_robotwin(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    height: int | None = None,
    width: int | None = None,
    action_period_ms: float = 60.0,
) -> list[str]:
    """Imports every episode under `source` (`data/chunk-*/episode_*.parquet` beside `videos/...mp4`) into `directory`.

    The published frames were lossy already; what is decoded is kept without further loss. The data names no
    initial state, no instruction and no success label: `initial_state_id` is empty, `success` is None. Episodes that
    are there already are skipped.

    Args:
        source: the published directory.
        directory: a data set of this module, created or continued.
        height, width: of the frames to keep; both, or neither for the published size.
        action_period_ms: time between two frames, 15 physics steps of 4 ms in the published data.

    Returns:
        The ids of the episodes imported by this call.

    Raises:
        FileNotFoundError: without any episode under `source`, or without an episode's video.
        ValueError: for rows that are not of the layout above.
    """
    if (height is None) is not (width is None):
        raise ValueError(f"height, width: expected both or neither; got {height}, {width}")
    tables = sorted(Path(source).glob("data/chunk-*/episode_*.parquet"))
    if not tables:
        raise FileNotFoundError(f"{source}: expected data/chunk-000/episode_000000.parquet and the like; found none")
    imported = []
    with EpisodeWriter(directory, action_period_ms=action_period_ms) as writer:
        for path in tables:
            episode_id = f"robotwin/adjust_bottle/{path.stem}"
            if episode_id in writer:
                continue
            writer.append(_read(path, episode_id, None if height is None or width is None else (height, width)))
            imported.append(episode_id)
    return imported


def absolute_targets(states: NDArray[np.float32], actions: NDArray[np.float32]) -> NDArray[np.float32]:
    """Absolute targets float32 (n - 1, 14) of n rows of 26: `targets[t]` leads from frame t to frame t + 1.

    Raises:
        ValueError: when a target is not the next row's state, which in this data it always is.
    """
    for name, rows in (("observation.state", states), ("action", actions)):
        if rows.ndim != 2 or rows.shape[1] != 26 or len(rows) < 2 or not np.isfinite(rows).all():
            raise ValueError(f"{name}: expected finite (n >= 2, 26); got {rows.shape}")
    targets = np.empty((len(states) - 1, 14), np.float32)
    targets[:, _JOINTS_14] = states[:-1, _JOINTS] + actions[:-1, _JOINTS]
    targets[:, _GRIPPERS_14] = actions[:-1, _GRIPPERS]
    miss = float(np.abs(targets - joint_states(states)[1:]).max())
    if miss > _TOLERANCE:
        raise ValueError(
            f"action: expected joint differences that lead to the next row; got one that misses by {miss:g}"
        )
    return targets


def joint_states(states: NDArray[np.float32]) -> NDArray[np.float32]:
    """The 14 joints and grippers of rows of 26, float32 (n, 14)."""
    result = np.empty((len(states), 14), np.float32)
    result[:, _JOINTS_14], result[:, _GRIPPERS_14] = states[:, _JOINTS], states[:, _GRIPPERS]
    return result


def _read(path: Path, episode_id: str, size: tuple[int, int] | None) -> Episode:
    table = require("pyarrow.parquet", "pyarrow").read_table(path, use_threads=False)
    states, actions = _rows(table, "observation.state", path), _rows(table, "action", path)
    targets = absolute_targets(states, actions)
    root, chunk = path.parents[2], path.parent.name
    video = root / "videos" / chunk / f"{path.stem}.mp4"
    if not video.is_file():
        raise FileNotFoundError(f"{video}: the video of {path.name} is not there")
    frames = read_video(video)
    if len(frames) != len(states):
        raise ValueError(f"{video}: expected {len(states)} frames, one a row of {path.name}; got {len(frames)}")
    if size is not None:
        frames = resized(frames, size)
    number = re.sub(r"\D", "", path.stem)
    return Episode(
        episode_id=episode_id,
        initial_state_id="",
        seed=0,
        instruction="adjust_bottle",
        requested_actions=targets,
        executed_actions=targets,
        proprioception=joint_states(states),
        rewards=np.zeros(len(targets), np.float32),
        end_reason="",
        terminated=False,
        policy_name="robotwin_expert",
        metadata={
            "imported_from": "RoboTwin 2.0 demonstration, published with Boundless-World-Model",
            "number": int(number),
        },
        frame_source=frames,
    )


def _rows(table: Any, name: str, path: Path) -> NDArray[np.float32]:
    if name not in table.column_names:
        raise ValueError(f"{path}: expected a column {name!r}; got {table.column_names}")
    return np.array(table[name].to_pylist(), dtype=np.float32)
