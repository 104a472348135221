"""Keyframe starts: later frames of recorded successes, which an episode reaches by replaying what was executed before.

WoVR starts some episodes near the difficulty. Here the way there is replayed in the target itself, so that no state has
to be set: it works in a simulator and in a world model alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Start:
    """Where a group's episodes start: an initial state, and what is replayed from it first.

    prefix_chunks: float32 (chunks, actions, dimensions), or None; source: the recording it is from, "" for none.
    """

    initial_state_id: str
    prefix_chunks: NDArray[np.float32] | None = None
    source: str = ""


def load_keyframes(directory: Path, decisions: Sequence[int], chunk_actions: int, interface: str = "") -> list[Start]:
    """Every start that the successes in `directory` offer, in order.

    Where a recording says after which chunk it had succeeded, starts after that are left out.

    Raises:
        SealedStateError: for a recording from a sealed test state.
        ValueError: where there is no start, or recordings are of another `interface` ("": not asked).
    """
    from worldserve.episodes import EpisodeReader, refuse_for_training

    reader = EpisodeReader(directory)
    refuse_for_training(info.initial_state_id for info in reader.infos)
    starts = []
    for position, info in enumerate(reader.infos):
        succeeded = info.success if info.success is not None else bool(info.verdict and info.verdict.success)
        if not succeeded:
            continue
        if interface and info.interface_fingerprint != interface:
            raise ValueError(
                f"keyframes: expected recordings of interface {interface}; {info.episode_id} in {directory} has "
                f"{info.interface_fingerprint or 'none'}. Its actions would mean something else; record again."
            )
        after = info.metadata.get("success_after_chunk") or []
        chunks = (info.length - 1) // chunk_actions
        useful = [d for d in decisions if d < chunks and not (d <= len(after) and after[d - 1])]
        if useful:
            actions = reader[position].executed_actions
            shaped = actions[: chunks * chunk_actions].reshape(chunks, chunk_actions, -1)
            starts += [Start(info.initial_state_id, shaped[:d].copy(), info.episode_id) for d in useful]
    if not starts:
        raise ValueError(
            f"keyframes: expected a recorded success in {directory} with a decision among {tuple(decisions)} before "
            f"it succeeded; got none in {len(reader)} episodes. Record successes (`worldserve collect` or "
            "`demonstrate`), or name other --keyframe-decisions."
        )
    return starts
