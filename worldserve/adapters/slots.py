"""Numbered slots, each with one episode at a time, over one server or several: what every adapter is made of."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from worldserve.client import EnvironmentClient, raise_for_errors
from worldserve.contract import Interface
from worldserve.messages import FrameSelection, ItemError, ResetItem, ResetReply, StepItem, StepReply

Item = TypeVar("Item", ResetItem, StepItem)
Reply = TypeVar("Reply", ResetReply, StepReply)
Call = Callable[[Sequence[Item]], "list[Reply | ItemError]"]
_SEED_LIMIT = 2**63
_FIRST_WAIT_S = 0.05


class NoEpisodeError(RuntimeError):
    """A step of a slot that holds no running episode.

    What to do: Reset the slot first; an episode that ended has none either.
    """


class EpisodeSlots:
    """`count` slots; slot i lives in server i modulo their number, for good.

    Start and noise seed of a slot's next episode come from the slot's own generator, so that they depend neither on the
    other slots nor on the servers. What a server refuses for now (UNAVAILABLE) is asked for again until `timeout_s`.

    Args:
        targets: HOST:PORT of servers, or one of them.
        count: slots, at least 1.
        initial_states: ids that a server knows; a reset draws one.
        seed: of the slots' generators.
        interface: what the caller was built for, such as the one that a policy's checkpoint records; every server must
            have it. None takes the first server's own, whatever it is.
        timeout_s: deadline of a call, retries included.

    Raises:
        ValueError: no targets or states, a count below 1, or servers of different interfaces.
        ConnectionError: a server could not be reached.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        count: int,
        initial_states: Sequence[str],
        seed: int = 0,
        *,
        interface: Interface | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        names = [targets] if isinstance(targets, str) else list(targets)
        if not names or count < 1 or not initial_states or isinstance(initial_states, str):
            raise ValueError(
                "targets, count, initial_states: expected at least one HOST:PORT, one slot and a list of one id; "
                f"got {names}, {count}, {initial_states!r}. `worldserve contract show TARGET` says what a server is."
            )
        self.count, self.initial_states, self._timeout_s = count, tuple(initial_states), timeout_s
        self.interface = interface if interface is not None else _interface_of(names[0], timeout_s)
        self._clients = [EnvironmentClient(name, timeout_s=timeout_s, interface=self.interface) for name in names]
        self._threads = ThreadPoolExecutor(len(names), thread_name_prefix="adapter") if len(names) > 1 else None
        self._prefix = uuid.uuid4().hex[:12]
        self._opened = [0] * count
        self._episode_ids = [""] * count
        self._chunks = [0] * count
        self._running = [False] * count
        self.seed([seed] * count)
        try:
            for client in self._clients:
                client.check_interface()
        except BaseException:
            self.close()
            raise

    def seed(self, seeds: Sequence[int], slots: Sequence[int] | None = None) -> None:
        """Makes the slots' generators anew; equal seeds in other slots are other generators."""
        if slots is None:
            self._generators = [np.random.default_rng([int(seed), slot]) for slot, seed in enumerate(seeds)]
            return
        for slot, seed in zip(slots, seeds, strict=True):
            self._generators[slot] = np.random.default_rng([int(seed), slot])

    def reset(
        self, slots: Sequence[int], starts: Sequence[tuple[str | None, int | None]] | None = None
    ) -> list[ResetReply]:
        """Closes what the slots hold and opens new episodes, in one call a server.

        Args:
            slots: which, each once.
            starts: a slot's initial state and noise seed; None in place of either, or of all, draws it.

        Raises:
            ItemFailedError: a server refused an episode; no slot of the call then holds a running one.
        """
        items: list[ResetItem] = []
        for position, slot in enumerate(slots):
            generator = self._generators[slot]
            # Both are drawn always: what one reset pins does not change what later ones draw.
            drawn = self.initial_states[int(generator.integers(len(self.initial_states)))]
            drawn_seed = int(generator.integers(_SEED_LIMIT))
            state, seed = starts[position] if starts is not None else (None, None)
            self._opened[slot] += 1
            name = f"{self._prefix}/{slot}/{self._opened[slot]}"
            items.append(ResetItem(name, drawn if state is None else state, drawn_seed if seed is None else int(seed)))
        self.release(slots)
        replies = self._call(slots, items, [client.reset for client in self._clients])
        for slot, item, reply in zip(slots, items, replies, strict=True):
            if not isinstance(reply, ItemError):
                self._episode_ids[slot], self._chunks[slot], self._running[slot] = item.episode_id, 0, True
        if any(isinstance(reply, ItemError) for reply in replies):
            self.release(slots)
        return raise_for_errors(replies)

    def step(self, slots: Sequence[int], actions: ArrayLike, frames: FrameSelection | None = None) -> list[StepReply]:
        """Runs one chunk in each slot.

        Args:
            slots: which, each once.
            actions: (len(slots), chunk_actions, dimensions), in the contract's units; sent as float32.
            frames: what to draw; the last frame by default.

        Raises:
            NoEpisodeError: a slot was never reset, or its episode has ended: servers never reset by themselves.
            ValueError: on another shape.
            ItemFailedError: a server refused a chunk. The slots that were not refused have moved on.
        """
        idle = [slot for slot in slots if not self._running[slot]]
        if idle:
            raise NoEpisodeError(
                f"slots {idle}: expected a running episode; got none, or one that has ended. Reset first."
            )
        values: NDArray[np.float32] = np.asarray(actions, np.float32)
        shape = (len(slots), self.interface.timing.chunk_actions, self.interface.action_dimensions)
        if values.shape != shape:
            raise ValueError(f"actions: expected shape {shape}, a chunk a slot; got {values.shape}")
        selection = FrameSelection.last() if frames is None else frames
        items = [
            StepItem(self._episode_ids[slot], self._chunks[slot], np.ascontiguousarray(chunk), selection)
            for slot, chunk in zip(slots, values, strict=True)
        ]
        replies = self._call(slots, items, [client.step for client in self._clients])
        for slot, reply in zip(slots, replies, strict=True):
            if not isinstance(reply, ItemError):
                self._chunks[slot] += 1
                self._running[slot] = not (reply.terminated or reply.truncated)
        return raise_for_errors(replies)

    def is_running(self, slot: int) -> bool:
        """Whether a step of the slot may follow."""
        return self._running[slot]

    def was_opened(self, slots: Sequence[int]) -> bool:
        """Whether each of the slots was reset at least once."""
        return all(self._opened[slot] for slot in slots)

    def release(self, slots: Sequence[int]) -> None:
        """Closes the slots' episodes at their servers."""
        for number, client in enumerate(self._clients):
            mine = [slot for slot in slots if slot % len(self._clients) == number and self._episode_ids[slot]]
            if mine:
                client.close_episodes([self._episode_ids[slot] for slot in mine])
        for slot in slots:
            self._episode_ids[slot], self._running[slot] = "", False

    def close(self) -> None:
        """Closes what is open, where the servers still answer, and the channels. May be repeated."""
        try:
            self.release(range(self.count))
        except (ConnectionError, RuntimeError):
            pass  # a server that is gone holds no episode
        finally:
            for client in self._clients:
                client.close()
            if self._threads is not None:
                self._threads.shutdown()

    def _call(
        self, slots: Sequence[int], items: Sequence[Item], calls: Sequence[Call[Item, Reply]]
    ) -> list[Reply | ItemError]:
        """Each server is asked about its own slots, the servers side by side; replies in the order of the items."""
        positions = [[p for p, slot in enumerate(slots) if slot % len(calls) == number] for number in range(len(calls))]
        asked = [(call, mine) for call, mine in zip(calls, positions, strict=True) if mine]

        def ask(part: tuple[Call[Item, Reply], list[int]]) -> list[Reply | ItemError]:
            return self._patiently(part[0], [items[p] for p in part[1]])

        answers = [ask(part) for part in asked] if self._threads is None else list(self._threads.map(ask, asked))
        by_position = {p: reply for (_, mine), part in zip(asked, answers) for p, reply in zip(mine, part)}
        return [by_position[p] for p in range(len(items))]

    def _patiently(self, call: Call[Item, Reply], items: Sequence[Item]) -> list[Reply | ItemError]:
        """Sends again what is UNAVAILABLE; every item of the contract is safe to repeat."""
        deadline = time.monotonic() + self._timeout_s
        replies: dict[int, Reply | ItemError] = {}
        waiting = list(range(len(items)))
        while True:
            for position, reply in zip(waiting, call([items[p] for p in waiting]), strict=True):
                replies[position] = reply
            held = [(p, reply) for p in waiting if isinstance(reply := replies[p], ItemError)]
            again = [(p, error.retry_after_s) for p, error in held if error.code == "UNAVAILABLE"]
            pause = max((max(_FIRST_WAIT_S, seconds) for _, seconds in again), default=0.0)
            if not again or time.monotonic() + pause > deadline:
                return [replies[position] for position in range(len(items))]
            time.sleep(pause)
            waiting = [p for p, _ in again]


def _interface_of(target: str, timeout_s: float) -> Interface:
    with EnvironmentClient(target, timeout_s=timeout_s) as client:
        return client.get_contract().interface
