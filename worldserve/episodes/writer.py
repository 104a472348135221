"""Appends episodes to a data set, one process a directory; a crash leaves every earlier episode readable."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worldserve.contract import Contract, fingerprint, to_yaml
from worldserve.episodes import layout
from worldserve.episodes.episode import Episode, EpisodeInfo, frames_sha256
from worldserve.episodes.lazy import require
from worldserve.episodes.video import VideoFrames, write_lossless

DEFAULT_ACTION_PERIOD_MS = 60.0


class EpisodeWriter:
    """Writes episodes into `directory`, created or continued.

        with EpisodeWriter("runs/collect") as writer:
            writer.append(Episode(...))

    An episode counts once its line in `meta/episodes.jsonl` is written, which is last. Several processes write several
    directories, which `EpisodeReader` reads as one and `merge_episodes` makes one.

    Args:
        directory: of the data set.
        action_period_ms: time between two frames, for episodes without a contract; a contract states its own.
        robot_type: recorded in `info.json`.

    Raises:
        RuntimeError: when another process writes the same directory.
        ValueError: when the directory holds something that is no data set of this layout.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        action_period_ms: float = DEFAULT_ACTION_PERIOD_MS,
        robot_type: str = "aloha-agilex",
    ) -> None:
        self.directory = Path(directory)
        self._action_period_ms = action_period_ms
        self._robot_type = robot_type
        (self.directory / "meta").mkdir(parents=True, exist_ok=True)
        self._lock = open(self.directory / layout.LOCK, "ab")  # noqa: SIM115 -- held until close
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise RuntimeError(
                f"{self.directory}: another writer holds this data set; write to a directory of your own and read both "
                "together, EpisodeReader([first, second])"
            ) from error
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, episode_id: object) -> bool:
        """Whether an episode of that id is there already, so that a resumed collection skips it."""
        return episode_id in self._ids

    def append(self, episode: Episode) -> EpisodeInfo:
        """Records an episode and returns what was noted of it.

        Raises:
            ValueError: when its id is there already, or its frame size, dimensions or timing are not the data set's.
        """
        if self._lock.closed:
            raise RuntimeError(f"{self.directory}: this writer is closed")
        if episode.episode_id in self._ids:
            raise ValueError(f"episode_id: {episode.episode_id!r} is already in {self.directory}; use another id")
        try:
            return self._append(episode)
        except BaseException:
            self._recover()
            raise

    def close(self) -> None:
        """Releases the directory."""
        self._lock.close()

    def _append(self, episode: Episode) -> EpisodeInfo:
        rate = self._rate_of(episode)
        self._extend_info(episode, rate)
        index = len(self._ids)
        sha256 = self._write_frames(episode, index, rate)
        task_index = self._task_index(episode.instruction)
        self._write_table(episode, index, task_index, rate)
        noted = self._note(episode, index, sha256)
        statistics = {"episode_index": index, "stats": _statistics(episode)}
        layout.append_json_line(self.directory / layout.STATISTICS, statistics)
        layout.append_json_line(self.directory / layout.EPISODES, _line(noted), durable=True)
        self._ids.add(episode.episode_id)
        self._frames += episode.action_count + 1
        self._videos += episode.frame_source is not None
        layout.write_json(self.directory / layout.INFO, self._with_totals())
        return noted

    def _recover(self) -> None:
        """Drops what an interrupted append left in the line files, and counts what is there."""
        lines = {}
        for name in (layout.EPISODES, layout.TASKS, layout.STATISTICS):
            path = self.directory / name
            lines[name], size = layout.read_json_lines(path)
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)
        episodes = lines[layout.EPISODES]
        if [line.get("episode_index") for line in episodes] != list(range(len(episodes))):
            raise ValueError(f"{self.directory / layout.EPISODES}: expected episodes 0, 1, 2, ... in order")
        path = self.directory / layout.STATISTICS
        if len(lines[layout.STATISTICS]) > len(episodes):
            content = path.read_bytes().splitlines(keepends=True)
            os.truncate(path, sum(len(line) for line in content[: len(episodes)]))
        self._ids = {line["episode_id"] for line in episodes}
        self._frames = sum(line["length"] for line in episodes)
        self._videos = sum(bool(line["frames_sha256"]) for line in episodes)
        self._tasks = {line["task"]: line["task_index"] for line in lines[layout.TASKS]}
        info_path = self.directory / layout.INFO
        self._info: dict[str, Any] = layout.read_json(info_path) if info_path.exists() else {}
        if self._info.get("codebase_version", layout.CODEBASE_VERSION) != layout.CODEBASE_VERSION:
            raise ValueError(
                f"{info_path}: expected codebase_version {layout.CODEBASE_VERSION}; "
                f"got {self._info.get('codebase_version')!r}; write to a new directory"
            )
        for directory in self.directory.glob("*/chunk-*"):
            for leftover in directory.rglob(".*.tmp"):
                leftover.unlink()

    def _rate_of(self, episode: Episode) -> Fraction:
        if episode.contract is not None:
            timing = episode.contract.interface.timing
            return layout.rate_of(timing.substeps_per_action * timing.substep_ms)
        if isinstance(episode.frame_source, VideoFrames):
            return episode.frame_source.frames_per_second
        return layout.rate_of(self._action_period_ms)

    def _extend_info(self, episode: Episode, rate: Fraction) -> None:
        """Writes to `info.json` what this episode adds; refuses what contradicts the data set."""
        source = episode.frame_source
        shape = None if source is None else (source.shape[1], source.shape[2])
        fresh = layout.features(episode.executed_actions.shape[1], shape, rate)
        if not self._info:
            self._info = {
                "codebase_version": layout.CODEBASE_VERSION,
                "robot_type": self._robot_type,
                "fps": float(rate),
                "data_path": layout.DATA_PATH,
                "video_path": layout.VIDEO_PATH,
                "features": {},
            }
        known = self._info["features"]
        if self._info["fps"] != float(rate):
            raise ValueError(f"{self.directory}: expected {self._info['fps']:g} frames a second; got {float(rate):g}")
        for name, feature in fresh.items():
            if name in known and known[name]["shape"] != feature["shape"]:
                raise ValueError(
                    f"{name}: expected shape {known[name]['shape']} as in {self.directory}; got {feature['shape']}; "
                    "write episodes of another shape to another directory"
                )
        if not fresh.keys() <= known.keys():
            self._info["features"] = {**known, **fresh}
            layout.write_json(self.directory / layout.INFO, self._with_totals())

    def _with_totals(self) -> dict[str, Any]:
        count = len(self._ids)
        totals = {
            "total_episodes": count,
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "total_videos": self._videos,
            "total_chunks": -(-count // layout.CHUNK_SIZE),
            "chunks_size": layout.CHUNK_SIZE,
            "splits": {"train": f"0:{count}"},
        }
        return {**self._info, **totals}

    def _write_frames(self, episode: Episode, index: int, rate: Fraction) -> str:
        source = episode.frame_source
        if source is None:
            return ""
        with layout.atomic(layout.video_path(self.directory, index), durable=True) as path:
            if isinstance(source, VideoFrames):
                shutil.copyfile(source.path, path)
                return source.sha256
            write_lossless(path, source, rate)
        return frames_sha256(source)

    def _task_index(self, instruction: str) -> int:
        if instruction not in self._tasks:
            index = len(self._tasks)
            layout.append_json_line(self.directory / layout.TASKS, {"task_index": index, "task": instruction})
            self._tasks[instruction] = index
        return self._tasks[instruction]

    def _write_table(self, episode: Episode, index: int, task_index: int, rate: Fraction) -> None:
        arrow, parquet = require("pyarrow", "pyarrow"), require("pyarrow.parquet", "pyarrow")
        rows = episode.action_count + 1
        numbers = np.arange(rows, dtype=np.int64)
        pad = numbers == rows - 1
        columns = {
            "observation.state": _vectors(arrow, episode.proprioception),
            "action": _vectors(arrow, _padded(episode.executed_actions)),
            "action.requested": _vectors(arrow, _padded(episode.requested_actions)),
            "action_is_pad": arrow.array(pad),
            "reward": arrow.array(np.append(episode.rewards, np.float32(0.0))),
            "timestamp": arrow.array((numbers / float(rate)).astype(np.float32)),
            "frame_index": arrow.array(numbers),
            "episode_index": arrow.array(np.full(rows, index, np.int64)),
            "index": arrow.array(numbers + self._frames),
            "task_index": arrow.array(np.full(rows, task_index, np.int64)),
        }
        with layout.atomic(layout.data_path(self.directory, index), durable=True) as path:
            parquet.write_table(arrow.table(columns), path, compression="zstd", use_dictionary=False)

    def _note(self, episode: Episode, index: int, sha256: str) -> EpisodeInfo:
        interface, provenance = self._contract(episode.contract)
        return EpisodeInfo(
            episode_index=index,
            episode_id=episode.episode_id,
            initial_state_id=episode.initial_state_id,
            seed=episode.seed,
            instruction=episode.instruction,
            length=episode.action_count + 1,
            success=episode.success,
            verdict=episode.verdict,
            end_reason=episode.end_reason,
            terminated=episode.terminated,
            truncated=episode.truncated,
            total_reward=episode.total_reward,
            clipped_count=episode.clipped_count,
            policy_name=episode.policy_name,
            policy_sha256=episode.policy_sha256,
            interface_fingerprint=interface,
            provenance_fingerprint=provenance,
            frames_sha256=sha256,
            metadata=dict(episode.metadata),
        )

    def _contract(self, contract: Contract | None) -> tuple[str, str]:
        """Both fingerprints of a contract, which is kept once a data set."""
        if contract is None:
            return "", ""
        interface, provenance = fingerprint(contract.interface), fingerprint(contract.provenance)
        path = layout.contract_path(self.directory, interface, provenance)
        if not path.exists():
            require("yaml", "PyYAML", "serving")
            with layout.atomic(path) as temporary:
                temporary.write_text(to_yaml(contract), encoding="utf-8")
        return interface, provenance


def _line(info: EpisodeInfo) -> dict[str, Any]:
    """An `EpisodeInfo` as LeRobot's line: its own `tasks` beside our fields."""
    values = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    values["tasks"] = [values.pop("instruction")]
    values["verdict"] = None if info.verdict is None else dataclasses.asdict(info.verdict)
    return values


def _padded(actions: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.concatenate([actions, actions[-1:]])


def _vectors(arrow: Any, values: NDArray[np.float32]) -> Any:
    flat = arrow.array(np.ascontiguousarray(values).reshape(-1))
    return arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _statistics(episode: Episode) -> dict[str, dict[str, list[Any]]]:
    """Per-feature minimum, maximum, mean, standard deviation and count, as LeRobot 2.1 keeps them an episode."""
    values: dict[str, NDArray[np.floating[Any]]] = {
        "observation.state": episode.proprioception.astype(np.float64),
        "action": _padded(episode.executed_actions).astype(np.float64),
    }
    statistics = {name: _summary(array, (0,), len(array)) for name, array in values.items()}
    source = episode.frame_source
    if isinstance(source, np.ndarray):
        sample = source[:: max(1, len(source) // 20)].astype(np.float64) / 255.0
        images = _summary(np.moveaxis(sample, 3, 1), (0, 2, 3), len(sample))
        statistics[layout.VIDEO_KEY] = {
            name: value if name == "count" else [[[number]] for number in value] for name, value in images.items()
        }
    return statistics


def _summary(values: NDArray[np.floating[Any]], axes: tuple[int, ...], count: int) -> dict[str, list[Any]]:
    reduced = {"min": values.min(axes), "max": values.max(axes), "mean": values.mean(axes), "std": values.std(axes)}
    return {**{name: array.tolist() for name, array in reduced.items()}, "count": [count]}
