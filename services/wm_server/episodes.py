"""Recorded episodes as world-model training reads them, and their split by initial state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import overload

from worldserve.episodes import Episode, EpisodeInfo, EpisodeReader, refuse_for_training


class EpisodeSubset(Sequence[Episode]):
    """Some episodes of a reader, by position; frames are decoded when asked for."""

    def __init__(self, reader: EpisodeReader, positions: Sequence[int]) -> None:
        self.reader, self.positions = reader, list(positions)

    @property
    def infos(self) -> list[EpisodeInfo]:
        """`infos[i]` belongs to `self[i]`."""
        return [self.reader.infos[position] for position in self.positions]

    def where(self, chosen: Callable[[EpisodeInfo], bool]) -> EpisodeSubset:
        """Those of whose facts `chosen` says so, in order."""
        return EpisodeSubset(self.reader, [p for p in self.positions if chosen(self.reader.infos[p])])

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> Episode: ...

    @overload
    def __getitem__(self, index: slice) -> list[Episode]: ...

    def __getitem__(self, index: int | slice) -> Episode | list[Episode]:
        if isinstance(index, slice):
            return [self.reader[position] for position in self.positions[index]]
        return self.reader[self.positions[index]]


def is_held_out(initial_state_id: str, fraction: float) -> bool:
    """Whether episodes from this state validate: by the state's name, so every episode from it falls on one side."""
    digest = hashlib.sha256(initial_state_id.encode()).digest()
    return int.from_bytes(digest[:4], "big") < fraction * 2**32


def load_episodes(directories: Sequence[Path], held_out_fraction: float) -> tuple[EpisodeSubset, EpisodeSubset]:
    """Training and validation episodes of `directories`; refuses sealed test states.

    Raises:
        SealedStateError: when an episode starts from a test state.
        ValueError: when no episode is left to train on, or none to validate with.
    """
    reader = EpisodeReader([str(directory) for directory in directories])
    refuse_for_training(info.initial_state_id for info in reader.infos)
    usable = [position for position, info in enumerate(reader.infos) if info.frames_sha256 and info.length == 201]
    held_out = [is_held_out(info.initial_state_id, held_out_fraction) for info in reader.infos]
    training = [position for position in usable if not held_out[position]]
    validation = [position for position in usable if held_out[position]]
    shown = ", ".join(map(str, directories))
    if not usable:
        raise ValueError(f"data: expected episodes of 200 actions recorded with frames; got none in {shown}")
    for name, positions, change in (("train on", training, "lower"), ("validate with", validation, "raise")):
        if not positions:
            states = len({reader.infos[position].initial_state_id for position in usable})
            raise ValueError(
                f"data: expected episodes to {name}; got none: of the {states} initial states in {shown}, "
                f"{states if validation else 0} are held out at held_out_fraction "
                f"{held_out_fraction}. Record episodes of more initial states, or {change} --held-out-fraction"
            )
    return EpisodeSubset(reader, training), EpisodeSubset(reader, validation)
