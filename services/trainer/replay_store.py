"""Replay store: the episodes of training runs, kept as they end: in memory, on disk or in Redis.

An episode here is what a trainer needs to learn from it again: executed chunks, what the policy saw at each decision,
its log-probabilities and values, reward, verdict, and which policy acted in which model. Frames between decisions are
not kept: `worldserve store export` draws them again from the executed actions.

    with open_store("runs/store") as store:
        store.append([episode])
        failures = [info for info in store.infos() if info.success == 0]
        store.read(failures[0].episode_id).arrays["executed_actions"]

torchrl's replay buffers sample tensors of one shape; here episodes are looked up by what they are, across processes.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, order=True)
class StoredInfo:
    """An episode without its arrays. Ordered by run, iteration and index."""

    run: str
    """The training run, unique over machines."""
    iteration: int
    index: int
    """Number of the episode in the iteration."""
    initial_state_id: str
    environment_seed: int
    """Of the world model's noise."""
    instruction: str
    success: int
    """Ground truth: 1, 0, or -1 where the target knows none."""
    verdict: int
    """The reward model's: 1, 0, or -1 without one."""
    verdict_peak: float | None
    reward_source: str
    policy_version: str
    """SHA-256 of the acting policy's weights and settings."""
    model_version: str
    """Fingerprint of the target's provenance: simulator or world model, weights, sampler, reward."""
    interface: str
    """Fingerprint of the contract's interface."""

    @property
    def episode_id(self) -> str:
        """The name in the store."""
        return f"{self.run}/{self.iteration}/{self.index}"

    @property
    def rewarded(self) -> bool:
        """Whether the run's reward called it a success."""
        return (self.success if self.reward_source == "success" else self.verdict) == 1


@dataclass(frozen=True)
class StoredEpisode:
    """An episode: `arrays` as in `Rollout`, without the axis of episodes; a policy's tensors are "samples/NAME"."""

    info: StoredInfo
    arrays: Arrays


class ReplayStore(Protocol):
    """Episodes by their id. Appending one that is there replaces it; every change is whole or not there at all."""

    def append(self, episodes: Iterable[StoredEpisode]) -> None:
        """Keep episodes."""

    def infos(self) -> list[StoredInfo]:
        """What is there, ordered by run, iteration and index."""

    def read(self, episode_id: str) -> StoredEpisode:
        """One episode. Raises KeyError where there is none, ValueError where it is damaged."""

    def drop(self, episode_ids: Collection[str]) -> None:
        """Forget episodes; those that are not there are no error."""

    def close(self) -> None:
        """Let go of files and connections."""

    def __enter__(self) -> ReplayStore:
        """The store itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""


def open_store(where: str | Path) -> ReplayStore:
    """The store at `where`: "memory", redis://[:PASSWORD@]HOST:PORT/DATABASE, or a directory (created if need be).

    Raises:
        ValueError: for a directory that holds something else. ConnectionError: where no Redis answers.
        RuntimeError: for Redis without its client library.
    """
    text = str(where)
    if text == "memory":
        return MemoryStore()
    if text.startswith(("redis://", "rediss://", "unix://")):
        from services.trainer.replay_store_redis import RedisStore

        return RedisStore(text)
    from services.trainer.replay_store_disk import DiskStore

    return DiskStore(Path(where))


class MemoryStore:
    """Of one process; gone with it."""

    def __init__(self) -> None:
        self._episodes: dict[str, StoredEpisode] = {}
        self._lock = threading.Lock()

    def append(self, episodes: Iterable[StoredEpisode]) -> None:
        """As in `ReplayStore`. Arrays are copied: what a trainer changes later is not the record."""
        for episode in episodes:
            kept = StoredEpisode(episode.info, {name: np.array(value) for name, value in episode.arrays.items()})
            with self._lock:
                self._episodes[episode.info.episode_id] = kept

    def infos(self) -> list[StoredInfo]:
        """As in `ReplayStore`."""
        with self._lock:
            return sorted((episode.info for episode in self._episodes.values()), key=place)

    def read(self, episode_id: str) -> StoredEpisode:
        """As in `ReplayStore`."""
        with self._lock:
            if episode_id not in self._episodes:
                raise KeyError(missing(episode_id, "memory"))
            found = self._episodes[episode_id]
        return StoredEpisode(found.info, {name: value.copy() for name, value in found.arrays.items()})

    def drop(self, episode_ids: Collection[str]) -> None:
        """As in `ReplayStore`."""
        with self._lock:
            for name in episode_ids:
                self._episodes.pop(name, None)

    def close(self) -> None:
        """Nothing to let go of."""

    def __enter__(self) -> MemoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def place(info: StoredInfo) -> tuple[str, int, int]:
    """The order of a store."""
    return (info.run, info.iteration, info.index)


def missing(episode_id: str, where: object) -> str:
    """The text of a KeyError."""
    return f"episode_id: expected one that the store holds; {episode_id!r} is not in {where}"


# One format for files and Redis: safetensors (no pickle), its metadata the info, compressed. ----------------------


def encode(episode: StoredEpisode) -> bytes:
    """An episode as bytes."""
    metadata = {"info": encode_info(episode.info)}
    arrays = {name: np.asarray(value, order="C") for name, value in episode.arrays.items()}
    return zlib.compress(save_arrays(arrays, metadata), level=1)


def decode(data: bytes, info: StoredInfo) -> StoredEpisode:
    """The inverse of `encode`; raises ValueError, naming the episode, where the bytes are damaged."""
    try:
        plain = zlib.decompress(data)
        header = json.loads(plain[8 : 8 + int.from_bytes(plain[:8], "little")])
        inside = decode_info(header["__metadata__"]["info"])
        arrays = load_arrays(plain)
    except (zlib.error, SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"episode {info.episode_id!r}: expected bytes of a replay store; {error}") from error
    if inside != info:
        raise ValueError(f"episode {info.episode_id!r}: expected its own bytes; got those of {inside.episode_id!r}")
    return StoredEpisode(info, arrays)


def encode_info(info: StoredInfo) -> str:
    """JSON."""
    return json.dumps(dataclasses.asdict(info), sort_keys=True, allow_nan=False)


def decode_info(text: str | bytes) -> StoredInfo:
    """The inverse of `encode_info`."""
    values = json.loads(text)
    try:
        return StoredInfo(**values)
    except TypeError as error:
        raise ValueError(f"replay store: expected an episode's facts, written by this version; {error}") from error
