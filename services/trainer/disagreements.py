"""Videos of episodes whose outcome a target gets wrong: the reference on the left, the target on the right."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.trainer.run_record import read_json, write_json
from services.trainer.side_by_side import join_frames
from worldserve.episodes import write_mp4

INDEX = "videos.json"


@dataclass(frozen=True)
class DisagreementVideo:
    """One video, the truth, and what the reward read on each side. Peaks are its highest probability."""

    video: str
    index: int
    episode_id: str
    initial_state_id: str
    kind: str
    success: bool
    reference_success: bool
    reference_peak: float
    target_success: bool
    target_peak: float


def disagrees(row: Mapping[str, Any]) -> bool:
    """Whether the target's outcome is not the truth."""
    return bool(row["success"]) != bool(row["target"]["success"])


class DisagreementVideos:
    """The videos in one directory, with an index that names every one that is whole.

    Args:
        directory: made with the first video.
        limit: at most so many, first come, first kept; 0 makes none.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory, self._limit = directory, limit
        path = directory / INDEX
        found = [DisagreementVideo(**entry) for entry in read_json(path)] if path.exists() else []
        self._videos = {video.episode_id: video for video in found}

    @property
    def room(self) -> int:
        """How many videos may still be added."""
        return max(0, self._limit - len(self._videos))

    def wants(self, row: Mapping[str, Any]) -> bool:
        """Whether this episode is a disagreement without a video, and there is room for one."""
        return disagrees(row) and row["episode_id"] not in self._videos and self.room > 0

    def add(self, row: Mapping[str, Any], reference: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        """Writes a video and then the index; both appear whole or not at all.

        Args:
            row: the episode, as in episodes.jsonl.
            reference, target: frames uint8 (n, height, width, 3).
        """
        name = f"{row['index']:06d}.mp4"
        self._directory.mkdir(parents=True, exist_ok=True)
        temporary = self._directory / f".{name}.{os.getpid()}.tmp"
        try:
            write_mp4(temporary, join_frames(reference, target))
            os.replace(temporary, self._directory / name)
        finally:
            temporary.unlink(missing_ok=True)
        self._videos[row["episode_id"]] = DisagreementVideo(
            video=name,
            index=row["index"],
            episode_id=row["episode_id"],
            initial_state_id=row["initial_state_id"],
            kind="missed_success" if row["success"] else "fake_success",
            success=row["success"],
            reference_success=row["reference"]["success"],
            reference_peak=row["reference"]["peak"],
            target_success=row["target"]["success"],
            target_peak=row["target"]["peak"],
        )
        listed = sorted(self._videos.values(), key=lambda video: video.index)
        write_json(self._directory / INDEX, [asdict(video) for video in listed])
