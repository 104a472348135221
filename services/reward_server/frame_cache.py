"""Labelled frames of recorded episodes, decoded once into one memory-mapped file.

Decoding a lossless episode costs 0.2 CPU-s, and mining reads every frame many times.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.reward_server.labels import frame_labels
from worldserve.episodes import EpisodeReader


@dataclass(frozen=True)
class LabelledFrames:
    """n episodes of k frames each.

    Attributes:
        frames: uint8 (n, k, height, width, 3), memory-mapped.
        labels: int8 (n, k), as in `labels.frame_labels`.
        frame_indices: int64 (k,), the episode frame numbers that are kept.
        success: bool (n,), the simulator's latched label.
        initial_state_ids: of every episode.
        episode_ids: of every episode.
    """

    frames: NDArray[np.uint8]
    labels: NDArray[np.int8]
    frame_indices: NDArray[np.int64]
    success: NDArray[np.bool_]
    initial_state_ids: tuple[str, ...]
    episode_ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.success)


def labelled_frames(
    directories: Sequence[Path],
    cache: Path,
    frame_indices: Sequence[int],
    on_progress: Callable[[int, int], None] | None = None,
) -> LabelledFrames:
    """Decodes (or finds in `cache`) frames `frame_indices` of every labelled episode of `directories`.

    Episodes without ground truth, without frames or of another length are left out.

    Raises:
        FileNotFoundError: for a directory that holds no data set.
        ValueError: when no episode is left, or none succeeded, or none failed.
    """
    reader = EpisodeReader(list(directories))
    longest = max(frame_indices) + 1
    kept = [
        position
        for position, info in enumerate(reader.infos)
        if info.success is not None and info.frames_sha256 and info.length >= longest
    ]
    infos = [reader.infos[position] for position in kept]
    success = np.array([bool(info.success) for info in infos], bool)
    if not len(success) or success.all() or not success.any():
        raise ValueError(
            f"data: expected episodes with frames and the simulator's label, successes and failures; got "
            f"{int(success.sum())} successes among {len(success)} usable episodes of {len(reader)} in "
            f"{', '.join(map(str, directories))}. Record policy rollouts with `worldserve collect`."
        )
    key = json.dumps([[info.frames_sha256 for info in infos], [int(index) for index in frame_indices]])
    path = cache / f"frames-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy"
    if not path.exists():
        _decode(reader, kept, frame_indices, path, on_progress)
    labels = np.stack(
        [frame_labels(bool(info.success), info.length, info.metadata)[list(frame_indices)] for info in infos]
    )
    return LabelledFrames(
        frames=np.load(path, mmap_mode="r"),
        labels=labels,
        frame_indices=np.asarray(frame_indices, np.int64),
        success=success,
        initial_state_ids=tuple(info.initial_state_id for info in infos),
        episode_ids=tuple(info.episode_id for info in infos),
    )


def _decode(
    reader: EpisodeReader,
    positions: Sequence[int],
    frame_indices: Sequence[int],
    path: Path,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Writes the file under a temporary name; a killed decode leaves nothing that looks whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    first = reader[positions[0]].frames_at([frame_indices[0]])
    shape = (len(positions), len(frame_indices), *first.shape[1:])
    try:
        table = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=shape)
        for row, position in enumerate(positions):
            table[row] = reader[position].frames_at(list(frame_indices))
            if on_progress is not None:
                on_progress(row + 1, len(positions))
        table.flush()
        del table
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
