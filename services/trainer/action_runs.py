"""Fixed action sequences run in a target: for `worldserve forks` mostly without frames, for `fidelity` with all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from services.trainer.calls import RETRYABLE_CODES, call_again
from services.trainer.plans import unique_run_name
from services.trainer.rollout import Client
from worldserve.contract import Interface
from worldserve.messages import (
    FrameSelection,
    ItemError,
    ItemFailedError,
    ResetItem,
    ResetReply,
    StepItem,
    StepReply,
    Verdict,
)
from worldserve.wire.options import INLINE_FRAME_BYTES


class FrameClient(Client, Protocol):
    """A client whose frames may be streamed, too."""

    def read_frames(self, episode_id: str, chunk_index: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Frames of a chunk that were kept for streaming, with their numbers."""


@dataclass(frozen=True)
class ActionRun:
    """What to run: `actions` float32 (n, dimensions), whole chunks, from an initial state; `seed` of a world model."""

    initial_state_id: str
    seed: int
    actions: NDArray[np.float32]


@dataclass(frozen=True)
class ActionOutcome:
    """What came of it: ground truth or None, verdict or None, and all replies (frames in them where wanted)."""

    reset: ResetReply
    replies: tuple[StepReply, ...]

    @property
    def success(self) -> bool | None:
        """Ground truth; None in a world model."""
        return self.replies[-1].success

    @property
    def verdict(self) -> Verdict | None:
        """The reward model's judgement, where there is one."""
        return self.replies[-1].verdict

    @property
    def frames(self) -> NDArray[np.uint8]:
        """Frames 0..n, uint8 (n + 1, height, width, 3), of a run with frames."""
        return np.concatenate([self.reset.frame[None], *(reply.frames for reply in self.replies)])


def every_frame(interface: Interface) -> FrameSelection:
    """All frames of a chunk: in the reply, or streamed where one chunk alone is more than a reply may hold."""
    observation = interface.observation
    size = interface.timing.chunk_actions * observation.height * observation.width * 3
    return FrameSelection.every(1, stream=size > INLINE_FRAME_BYTES)


def run_actions(
    client: Client, runs: Sequence[ActionRun], chunk_actions: int, selection: FrameSelection | None = None
) -> list[ActionOutcome]:
    """Runs episodes of one length side by side, in order; none stays open. `Replay` would draw every frame.

    Args:
        client: a `FrameClient` where `selection` streams.
        selection: frames of each chunk that are wanted (none: without frames).

    Raises:
        ItemFailedError: when one could not be run, also when called again.
        ValueError: for lengths that differ or are no whole chunks; nothing was sent.
    """
    lengths = {len(run.actions) for run in runs}
    if len(lengths) != 1 or any(length % chunk_actions or not length for length in lengths):
        raise ValueError(
            f"actions: expected episodes of one length in whole chunks of {chunk_actions}; got {sorted(lengths)}"
        )
    names = [f"{unique_run_name('forks')}/{number}" for number in range(len(runs))]
    away = False
    try:
        found = drive(client, runs, names, chunk_actions, selection or FrameSelection.none(), call_again)
    except ConnectionError:
        away = True  # nobody is there to free them
        raise
    finally:
        if not away:
            client.close_episodes(names)
    failed = [outcome for outcome in found if isinstance(outcome, ItemError)]
    if failed:
        # First those that will not pass by calling the command again.
        raise ItemFailedError(sorted(failed, key=lambda error: error.code in RETRYABLE_CODES))
    return [outcome for outcome in found if isinstance(outcome, ActionOutcome)]


def drive(
    client: Any,
    runs: Sequence[ActionRun],
    names: Sequence[str],
    chunk_actions: int,
    selection: FrameSelection,
    call: Callable[[Callable[[Any], list[Any]], Sequence[Any]], list[Any]],
) -> list[ActionOutcome | ItemError]:
    """Runs episodes of any lengths as `names`, which stay open; an outcome or error each. One's error is its own.

    Args:
        client: a `Client`; a `FrameClient` where `selection` streams.
        call: sends items, and again those that may pass, as `call_again` does.
    """
    opening = [ResetItem(name, run.initial_state_id, run.seed) for name, run in zip(names, runs, strict=True)]
    opened = call(client.reset, opening)
    errors = {n: reply for n, reply in enumerate(opened) if isinstance(reply, ItemError)}
    replies: dict[int, list[StepReply]] = {n: [] for n in range(len(runs))}
    for first in range(0, max((len(run.actions) for run in runs), default=0), chunk_actions):
        running = [n for n, run in enumerate(runs) if n not in errors and first < len(run.actions)]
        items = [
            StepItem(
                names[n],
                first // chunk_actions,
                np.ascontiguousarray(runs[n].actions[first : first + chunk_actions]),
                selection,
            )
            for n in running
        ]
        for n, item, reply in zip(running, items, call(client.step, items) if items else [], strict=True):
            checked = reply if isinstance(reply, ItemError) else _run_as_sent(client, item, reply)
            if isinstance(checked, ItemError):
                errors[n] = checked
            else:
                replies[n].append(checked)
    return [errors.get(n) or ActionOutcome(opened[n], tuple(replies[n])) for n in range(len(runs))]


def _run_as_sent(client: FrameClient, item: StepItem, reply: StepReply) -> StepReply | ItemError:
    """The reply with its frames, or an error where other actions were run than those sent."""
    different = int((reply.executed_actions != item.actions).sum())
    if different:
        return ItemError(
            "FAILED_PRECONDITION",
            "ACTIONS_CHANGED",
            f"chunk {item.chunk_index}.executed_actions",
            "the actions sent, run as they are",
            f"{different} of {item.actions.size} numbers changed",
            "The recording was made under other limits; record it again with this interface.",
        )
    if not item.frames.stream:
        return reply
    frames = np.stack([frame for _, frame in client.read_frames(item.episode_id, item.chunk_index)])
    return replace(reply, frames=frames)
