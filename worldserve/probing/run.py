"""The probes' episodes in a target: what came back, episode by episode. No verdict is made here."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from worldserve.client import EnvironmentClient
from worldserve.contract import Contract
from worldserve.messages import (
    FrameSelection,
    ItemFailedError,
    ResetItem,
    ResetReply,
    StepItem,
    StepReply,
    raise_for_errors,
)
from worldserve.probing.reference import Reference
from worldserve.probing.script import HOME_AT, STRIDE, WAYS, Script, default_path
from worldserve.wire.options import INLINE_FRAME_BYTES

Frame = NDArray[np.uint8]


@dataclass(frozen=True)
class Question:
    """What is asked of a target.

    `state` is where most episodes start, `other_state` another one, `seed` of all but the episodes that vary it.
    `known_frames`: frame 0 by initial state, where it is known (sealed sets).
    """

    state: str
    other_state: str
    seed: int = 0
    known_frames: Mapping[str, Frame] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.state == self.other_state:
            raise ValueError(f"state: expected two different initial states; got {self.state!r} twice")


@dataclass
class Trace:
    """One episode: its Reset, what was sent, and what came back."""

    name: str
    item: ResetItem
    opened: ResetReply
    actions: NDArray[np.float32]
    replies: list[StepReply] = field(default_factory=list)
    frames: dict[int, Frame] = field(default_factory=dict)

    @property
    def last(self) -> StepReply | None:
        """The last reply."""
        return self.replies[-1] if self.replies else None

    @property
    def elapsed(self) -> int:
        """Actions executed."""
        return self.replies[-1].elapsed_steps if self.replies else 0

    @property
    def ended(self) -> bool:
        """Whether the target says so."""
        return bool(self.replies) and (self.replies[-1].terminated or self.replies[-1].truncated)


@dataclass
class Run:
    """All episodes of one probing, by name, in the order in which they were opened."""

    contract: Contract
    question: Question
    script: Script
    traces: dict[str, Trace]
    sweeps: list[list[int]]
    """Which numbers of the action the episodes "sweep 0", "sweep 1", ... moved."""

    @property
    def steps(self) -> int:
        """Chunks that were run."""
        return sum(len(trace.replies) for trace in self.traces.values())


class Prober:
    """Runs the episodes.

    Args:
        client: of the target.
        question: states and seed.
        reference: where a trusted target's answers, the excursion's path and a successful episode come from.
        on_progress: told the chunks just run and the chunks in all.
    """

    def __init__(
        self,
        client: EnvironmentClient,
        question: Question,
        reference: Reference | None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._client, self._question, self._reference = client, question, reference
        self._on_progress = on_progress
        self._run_name = f"probe-{uuid.uuid4().hex[:12]}"
        self._open: set[str] = set()
        self._asked: dict[str, ResetItem] = {}
        self._opened = 0
        self._total = 0

    def run(self) -> Run:
        """Raises ItemFailedError where the target refuses what the contract allows, ConnectionError where it is away.

        Episodes that are open are closed, whatever happens.
        """
        contract = self._client.get_contract()
        try:
            return self._run(contract)
        finally:
            if self._open:
                self._client.close_episodes(sorted(self._open))

    def _run(self, contract: Contract) -> Run:
        asked, interface = self._question, contract.interface
        [first] = self._reset([ResetItem(self._name(), asked.state, asked.seed)])
        home = first.proprioception
        path = self._reference.path if self._reference is not None else default_path(interface, home)
        script = Script(interface, home, path)
        sweeps, chunks = script.sweeps(), interface.chunks_per_episode
        full = 2 + len(sweeps) + (3 if self._reference is not None else 0)
        self._total = full * chunks + 6
        traces = {"hold": self._episode("hold", script.hold(), first)}
        for number, (_, actions) in enumerate(sweeps):
            traces[f"sweep {number}"] = self._whole(f"sweep {number}", asked.state, actions, asked.seed)
        onset = range(HOME_AT + 1, script.limit + 1)
        traces["excursion"] = self._whole("excursion", asked.state, script.excursion(), asked.seed, [onset])
        [other] = self._reset([ResetItem(self._name(), asked.other_state, asked.seed)])
        traces["other state"] = Trace("other state", self._asked[other.episode_id], other, script.hold())
        self._close([other.episode_id])
        opened = self._open_success()
        if self._reference is not None and opened is not None:
            state, actions = self._reference.success_state, self._reference.success_actions
            traces["success"] = self._episode("success", actions, opened, [script.frames_of(way) for way in WAYS])
            late = actions.copy()
            late[: script.limit // 2] = script.home
            traces["late start"] = self._whole("late start", state, late, asked.seed)
            mirrored = script.gripped_otherwise(actions)
            if mirrored is not None:
                traces["grippers reversed"] = self._whole("grippers reversed", state, mirrored, asked.seed)
        traces |= self._companions(script, sweeps[0][1])
        return Run(contract, asked, script, traces, [moved for moved, _ in sweeps])

    def _companions(self, script: Script, actions: NDArray[np.float32]) -> dict[str, Trace]:
        """The first chunk of the first sweep again: after another episode's, among others, and with another seed."""
        asked, size = self._question, script.interface.timing.chunk_actions
        sweep, still = actions[:size], script.hold()[:size]
        neighbour, again = self._reset(
            [
                ResetItem(self._name(), asked.other_state, asked.seed),
                ResetItem(self._name(), asked.state, asked.seed),
            ]
        )
        found = {
            "neighbour": Trace("neighbour", self._asked[neighbour.episode_id], neighbour, still),
            "again": Trace("again", self._asked[again.episode_id], again, sweep),
        }
        self._chunk([found["neighbour"]], 0)
        self._chunk([found["again"]], 0)
        self._close([neighbour.episode_id, again.episode_id])
        together = self._reset(
            [
                ResetItem(self._name(), asked.state, asked.seed),
                ResetItem(self._name(), asked.other_state, asked.seed + 1),
                ResetItem(self._name(), asked.state, asked.seed + 1),
            ]
        )
        batch = [
            Trace(name, self._asked[reply.episode_id], reply, given)
            for name, reply, given in zip(
                ("in a batch", "batch neighbour", "other seed in the batch"),
                together,
                (sweep, still, sweep),
                strict=True,
            )
        ]
        self._chunk(batch, 0)
        self._close([reply.episode_id for reply in together])
        [seeded] = self._reset([ResetItem(self._name(), asked.state, asked.seed + 1)])
        alone = Trace("other seed", self._asked[seeded.episode_id], seeded, sweep)
        self._chunk([alone], 0)
        self._close([seeded.episode_id])
        return found | {trace.name: trace for trace in [*batch, alone]}

    def _whole(
        self, name: str, state: str, actions: NDArray[np.float32], seed: int, every: Sequence[range] = ()
    ) -> Trace:
        [opened] = self._reset([ResetItem(self._name(), state, seed)])
        return self._episode(name, actions, opened, every)

    def _episode(
        self, name: str, actions: NDArray[np.float32], opened: ResetReply, every: Sequence[range] = ()
    ) -> Trace:
        """Until the target says that it ended, or the actions are used up; in chunks that `every` names, all frames."""
        trace = Trace(name, self._asked[opened.episode_id], opened, actions)
        size = self._size(trace)
        for index in range(len(actions) // size):
            dense = any(part.start <= (index + 1) * size and index * size < part.stop - 1 for part in every)
            self._chunk([trace], index, dense)
            if trace.ended:
                break
        self._close([opened.episode_id])
        return trace

    def _size(self, trace: Trace) -> int:
        return self._client.interface.timing.chunk_actions

    def _chunk(self, traces: Sequence[Trace], index: int, every: bool = False) -> None:
        size = self._size(traces[0])
        stride, observation = 1 if every or size % STRIDE else STRIDE, self._client.interface.observation
        stream = size // stride * observation.height * observation.width * 3 * len(traces) > INLINE_FRAME_BYTES
        items = [
            StepItem(
                trace.item.episode_id,
                index,
                np.ascontiguousarray(trace.actions[index * size : (index + 1) * size]),
                FrameSelection.every(stride, stream=stream),
            )
            for trace in traces
        ]
        for trace, reply in zip(traces, raise_for_errors(self._client.step(items)), strict=True):
            trace.replies.append(reply)
            inline = zip((int(at) for at in reply.frame_indices), reply.frames, strict=True)
            trace.frames |= dict(self._client.read_frames(reply.episode_id, index) if stream else inline)
        self._on_progress(len(traces), self._total)

    def _reset(self, items: Sequence[ResetItem]) -> list[ResetReply]:
        self._open |= {item.episode_id for item in items}
        replies = raise_for_errors(self._client.reset(items))
        # By the name in the reply: what was asked for stands beside what came, whatever the reply says.
        self._asked |= {reply.episode_id: item for item, reply in zip(items, replies, strict=True)}
        return replies

    def _open_success(self) -> ResetReply | None:
        """The Reset of the reference's episode that succeeds; None where the target has no such initial state."""
        if self._reference is None:
            return None
        try:
            [opened] = self._reset([ResetItem(self._name(), self._reference.success_state, self._question.seed)])
        except ItemFailedError as error:
            if error.errors[0].reason == "INITIAL_STATE_UNKNOWN":
                return None
            raise
        return opened

    def _close(self, names: Sequence[str]) -> None:
        self._client.close_episodes(names)
        self._open -= set(names)

    def _name(self) -> str:
        self._opened += 1
        return f"{self._run_name}/{self._opened}"
