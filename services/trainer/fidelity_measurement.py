"""Recorded episodes drawn in two targets, read by one reward, and kept in one directory as rows, arrays and videos.

OUT/episodes.jsonl             one object an episode; an episode counts once its line is there
OUT/probabilities/000123.npz   what the reward read in each frame of the episode at position 123 of the data
OUT/videos/000123.mp4          reference and target side by side, of disagreements; videos.json names them
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.trainer.disagreements import DisagreementVideos
from services.trainer.image_quality import image_errors
from services.trainer.open_loop import Clip, Drawn, PairedRuns, Target, read_clips
from services.trainer.run_record import append_jsonl, read_jsonl
from worldserve.client import RewardClient
from worldserve.contract import Contract, fingerprint
from worldserve.episodes import Episode, EpisodeInfo, frames_sha256
from worldserve.messages import ItemError

ROWS, PROBABILITIES, VIDEOS = "episodes.jsonl", "probabilities", "videos"


@dataclass(frozen=True)
class Subject:
    """One recorded episode that is replayed; `index` is its position in the data."""

    index: int
    info: EpisodeInfo
    episode: Episode


@dataclass(frozen=True)
class Servers:
    """Who takes part: both targets, the reward, and their contracts (None for a recording)."""

    reference: Target
    reference_contract: Contract | None
    target: Target
    target_contract: Contract
    reward: RewardClient
    reward_address: str
    reward_contract: Contract


@dataclass(frozen=True)
class MeasurementSettings:
    """Where a measurement goes and how; fields as in `FidelityConfig`."""

    out: Path
    batch: int
    videos: int
    moving_threshold: float


def data_sha256(subjects: Sequence[Subject]) -> str:
    """SHA-256 over what is replayed: ids, states, seeds, labels, recorded frames' hashes, and executed actions."""
    digest = hashlib.sha256()
    for subject in subjects:
        info = subject.info
        facts = (info.episode_id, info.initial_state_id, info.seed, info.success, info.frames_sha256)
        digest.update(repr(facts).encode())
        digest.update(np.ascontiguousarray(subject.episode.executed_actions).tobytes())
    return digest.hexdigest()


class Measurement:
    """Reads drawn episodes and keeps their rows, probabilities and videos in one directory."""

    def __init__(self, settings: MeasurementSettings, servers: Servers, subjects: Sequence[Subject]) -> None:
        self._settings, self._servers = settings, servers
        self._subjects = {subject.info.episode_id: subject for subject in subjects}
        self._videos = DisagreementVideos(settings.out / VIDEOS, settings.videos)
        self._reward_provenance = fingerprint(servers.reward_contract.provenance)
        found = read_jsonl(settings.out / ROWS)
        self.rows = {row["episode_id"]: row for row in found if row["episode_id"] in self._subjects}
        self.failed: dict[str, str] = {}

    def missing(self) -> list[Subject]:
        """Episodes without a row, and disagreements whose video is still wanted, as many as there is room for."""
        found, room = list[Subject](), self._videos.room
        for name, subject in self._subjects.items():
            only_video = name in self.rows
            if not only_video or (room > 0 and self._videos.wants(self.rows[name])):
                found.append(subject)
                room -= only_video
        return found

    def ordered(self) -> list[dict[str, Any]]:
        """The rows, in the order of the data."""
        return [self.rows[name] for name in self._subjects if name in self.rows]

    def run(self, on_progress: Callable[[int], None]) -> None:
        """Measure what is missing. Episodes that fail are in `failed`, with the reason; the others are kept."""
        todo = [subject.episode for subject in self.missing()]
        batch = self._settings.batch
        batches = [todo[first : first + batch] for first in range(0, len(todo), batch)]
        with PairedRuns(self._servers.reference, self._servers.target) as runs:
            for episodes, outcomes in runs.over(batches):
                self._check_reward()
                for episode, outcome in zip(episodes, outcomes):
                    failure = outcome if isinstance(outcome, ItemError) else self._keep(episode, outcome)
                    if failure is not None:
                        self.failed[episode.episode_id] = str(failure)
                    on_progress(1)

    def _check_reward(self) -> None:
        """Score names no server; this one asks before each batch whether it is still the same."""
        found = fingerprint(self._servers.reward.get_contract().provenance)
        if found != self._reward_provenance:
            raise ValueError(
                f"reward: expected the reward model {self._reward_provenance} throughout; "
                f"{self._servers.reward_address} serves {found} now. Serve the former one again."
            )

    def _keep(self, episode: Episode, drawn: Drawn) -> ItemError | None:
        """Measure one episode and write it: probabilities and video first, the row that says they are there last."""
        subject = self._subjects[episode.episode_id]
        interface = self._servers.target_contract.interface
        readings = read_clips(self._servers.reward, [drawn.reference.frames, drawn.target.frames], interface)
        for side, reading in zip(("reference", "target"), readings):
            if isinstance(reading, ItemError):
                return dataclasses.replace(reading, name=f"reward of the {side}: {reading.name}")
        reference, target = (reading for reading in readings if not isinstance(reading, ItemError))
        truth = subject.info.success if drawn.reference.success is None else drawn.reference.success
        assert truth is not None  # check_subjects
        errors = image_errors(drawn.reference.frames, drawn.target.frames, self._settings.moving_threshold)
        place = f"{PROBABILITIES}/{subject.index:06d}.npz"
        row = {
            "index": subject.index,
            "episode_id": episode.episode_id,
            "initial_state_id": episode.initial_state_id,
            "seed": episode.seed,
            "success": truth,
            "recorded_success": subject.info.success,
            "frames_as_recorded": self._as_recorded(subject, drawn.reference),
            "reference": {"success": reference.verdict.success, "peak": reference.verdict.peak},
            "target": {"success": target.verdict.success, "peak": target.verdict.peak},
            "threshold": target.verdict.threshold,
            "psnr_db": errors.psnr_db,
            "moving_psnr_db": errors.moving_psnr_db,
            "ssim": errors.ssim,
            "image_errors": errors.as_dict(),
            "probabilities": place,
        }
        arrays = {"reference": reference.probabilities, "target": target.probabilities}
        _write_arrays(self._settings.out / place, arrays | {"frame_indices": target.frame_indices})
        if self._videos.wants(row):
            self._videos.add(row, drawn.reference.frames, drawn.target.frames)
        if episode.episode_id not in self.rows:
            append_jsonl(self._settings.out / ROWS, [row])
            self.rows[episode.episode_id] = row
        return None

    def _as_recorded(self, subject: Subject, clip: Clip) -> bool | None:
        """Whether a replayed reference drew the recorded frames; None where there is nothing to compare."""
        if self._servers.reference_contract is None or not subject.info.frames_sha256:
            return None
        return frames_sha256(clip.frames) == subject.info.frames_sha256


def _write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    os.replace(temporary, path)


def read_probabilities(directory: Path, row: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """What the reward read in an episode's frames: float32 (n,) "reference" and "target", int32 "frame_indices"."""
    with np.load(directory / row["probabilities"], allow_pickle=False) as arrays:
        return {name: arrays[name] for name in ("reference", "target", "frame_indices")}
