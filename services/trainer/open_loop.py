"""Recorded actions in a target, open loop, every frame drawn; and what one frozen reward reads in those frames.

Nothing the target draws reaches a policy: the actions are those that a recorded episode executed. What two targets
make of them can therefore be compared frame by frame.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.trainer.action_runs import ActionRun, drive, every_frame
from services.trainer.calls import Answer, Item, call_again
from services.trainer.plans import unique_run_name
from worldserve.client import EnvironmentClient, RewardClient
from worldserve.contract import Contract, Interface
from worldserve.episodes import Episode
from worldserve.messages import (
    ItemError,
    ScoreItem,
    ScoreReply,
    Verdict,
)


@dataclass(frozen=True)
class Clip:
    """What a target made of an episode: frames uint8 (1 + n, height, width, 3), and its ground truth or None."""

    frames: NDArray[np.uint8]
    success: bool | None


@dataclass(frozen=True)
class Reading:
    """What the reward read in a clip: probabilities float32 (n,) of the frames `frame_indices` int32 (n,), verdict."""

    probabilities: NDArray[np.float32]
    frame_indices: NDArray[np.int32]
    verdict: Verdict


class Target(Protocol):
    """Where recorded actions can be run."""

    def run(self, episodes: Sequence[Episode]) -> list[Clip | ItemError]:
        """One clip or error an episode, in order."""


class InterruptedRunError(RuntimeError):
    """`ServedTarget.stop` was called while episodes ran.

    What to do: Run the same command again; what was recorded is kept.
    """


class RecordedTarget:
    """The recording itself as a target: its own frames and its ground truth."""

    def run(self, episodes: Sequence[Episode]) -> list[Clip | ItemError]:
        """The recorded frames."""
        return [self._read(episode) for episode in episodes]

    @staticmethod
    def _read(episode: Episode) -> Clip | ItemError:
        try:
            return Clip(episode.frames, episode.success)
        except (OSError, ValueError) as error:
            return ItemError("DATA_LOSS", "FRAMES_UNREADABLE", "frames", "recorded frames", str(error), "Record again.")


class ServedTarget:
    """A simulator or world model behind a client that was made for the interface of `contract`."""

    def __init__(self, client: EnvironmentClient, contract: Contract) -> None:
        self._client = client
        self._selection = every_frame(contract.interface)
        self._chunk = contract.interface.timing.chunk_actions
        self._stop = threading.Event()

    def stop(self) -> None:
        """Lets a `run` in another thread end after its present call; it raises InterruptedRunError."""
        self._stop.set()

    def run(self, episodes: Sequence[Episode]) -> list[Clip | ItemError]:
        """Runs the executed actions from the recorded state and seed. A failed episode leaves the others alone."""
        run_name = unique_run_name("open-loop")
        ids = [f"{run_name}/{number}" for number in range(len(episodes))]
        away = False
        try:
            return self._run(episodes, ids)
        except ConnectionError:
            away = True  # nobody is there to free them
            raise
        finally:
            if not away:
                self._client.close_episodes(ids)

    def _run(self, episodes: Sequence[Episode], ids: Sequence[str]) -> list[Clip | ItemError]:
        runs = [ActionRun(episode.initial_state_id, episode.seed, episode.executed_actions) for episode in episodes]
        found = drive(self._client, runs, ids, self._chunk, self._selection, self._call)
        return [o if isinstance(o, ItemError) else Clip(o.frames, o.success) for o in found]

    def _call(self, call: Callable[[Sequence[Item]], list[Answer]], items: Sequence[Item]) -> list[Answer]:
        if self._stop.is_set():
            raise InterruptedRunError("stopped")
        return call_again(call, items, self._stop.wait)


def read_clips(
    client: RewardClient, clips: Sequence[NDArray[np.uint8]], interface: Interface
) -> list[Reading | ItemError]:
    """The reward's reading of clips uint8 (1 + n, height, width, 3), frame 0 first; only frames it reads are sent."""
    first, last = interface.reward.first_frame, interface.reward.last_frame
    items = [
        ScoreItem(f"clip-{n}", frames[first : last + 1], np.arange(first, last + 1, dtype=np.int32))
        for n, frames in enumerate(clips)
    ]
    readings: list[Reading | ItemError] = []
    for item, frames in zip(items, clips):
        if len(frames) <= last:
            error = ItemError(
                "INVALID_ARGUMENT", "TOO_FEW_FRAMES", "frames", f"frames 0 to {last}", f"{len(frames)} frames",
                "Give whole episodes.",
            )  # fmt: skip
            readings.append(error)
            continue
        [reply] = call_again(client.score, [item])
        readings.append(reply if isinstance(reply, ItemError) else _reading(reply))
    return readings


def _reading(reply: ScoreReply) -> Reading | ItemError:
    verdict = reply.verdict
    if not (np.isfinite(reply.probabilities).all() and np.isfinite([verdict.peak, verdict.threshold]).all()):
        return ItemError(
            "INTERNAL", "NON_FINITE_OUTPUT", "probabilities", "finite numbers", "some that are not",
            "The reward model is damaged; serve another.",
        )  # fmt: skip
    return Reading(reply.probabilities, reply.frame_indices, verdict)


@dataclass(frozen=True)
class Drawn:
    """An episode in both targets; an error of either stands for the pair."""

    reference: Clip
    target: Clip


class PairedRuns:
    """Batches of episodes in two targets at once, one batch ahead of who reads them.

        with PairedRuns(reference, target) as runs:
            for batch, drawn in runs.over(batches):
                ...

    Leaving it, by an error or Ctrl-C as well, waits for calls under way and frees the episodes in the servers.
    """

    def __init__(self, reference: Target, target: Target) -> None:
        self._targets = (reference, target)
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="open-loop")

    def __enter__(self) -> PairedRuns:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for target in self._targets:
            if isinstance(target, ServedTarget):
                target.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def over(self, batches: Sequence[Sequence[Episode]]) -> Iterator[tuple[Sequence[Episode], list[Drawn | ItemError]]]:
        """Each batch with what became of its episodes, in order."""
        ahead = self._start(batches[0]) if batches else None
        for number, batch in enumerate(batches):
            assert ahead is not None
            sides = [future.result() for future in ahead]
            ahead = self._start(batches[number + 1]) if number + 1 < len(batches) else None
            yield batch, [_pair(reference, target) for reference, target in zip(*sides)]

    def _start(self, batch: Sequence[Episode]) -> list[Future[list[Clip | ItemError]]]:
        return [self._pool.submit(target.run, batch) for target in self._targets]


def _pair(reference: Clip | ItemError, target: Clip | ItemError) -> Drawn | ItemError:
    for side, clip in (("reference", reference), ("target", target)):
        if isinstance(clip, ItemError):
            return replace(clip, name=f"{side}: {clip.name}")
    assert isinstance(reference, Clip)
    assert isinstance(target, Clip)
    return Drawn(reference, target)
