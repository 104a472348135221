"""One fault as a layer between a caller and a target: calls pass through it, changed as the fault would change them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from worldserve.contract import Interface, execute
from worldserve.messages import ItemError, ResetItem, ResetReply, StepItem, StepReply


class Calls(Protocol):
    """What a layer stands on: a client, or the next layer."""

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        """Opens episodes."""
        ...

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        """Runs one chunk in each of some episodes."""
        ...

    def close_episodes(self, episode_ids: Sequence[str]) -> int:
        """Frees episodes."""
        ...


class Layer:
    """Passes everything through; a fault overrides what it distorts.

    A repeated call must give what the first gave, but where that is the fault (`EpisodesLeak`).
    """

    def __init__(self, inner: Calls, interface: Interface) -> None:
        self.inner, self.interface = inner, interface

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        """Opens episodes."""
        return self.inner.reset(items)

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        """Runs one chunk in each of some episodes."""
        return self.inner.step(items)

    def close_episodes(self, episode_ids: Sequence[str]) -> int:
        """Frees episodes."""
        return self.inner.close_episodes(episode_ids)


class ActionLayer(Layer):
    """A mistake in what is sent, hidden in what is returned: only the world shows it.

    `executed_actions`, `clipped_count` and `proprioception` of the replies are what the contract promises for the
    actions that the caller gave, as an adapter that maps both ways with one mistake would report.
    """

    def __init__(self, inner: Calls, interface: Interface) -> None:
        super().__init__(inner, interface)
        # By episode and chunk: the last target before the chunk, and the last number that the caller gave.
        self._targets: dict[str, dict[int, NDArray[np.float32]]] = {}
        self._given: dict[str, dict[int, NDArray[np.float32]]] = {}
        self._states: dict[str, NDArray[np.float32]] = {}

    def distort(self, item: StepItem, items: Sequence[StepItem]) -> NDArray[np.float32]:
        """What is sent in place of the item's actions, float32 (chunk_actions, dimensions)."""
        raise NotImplementedError

    def reset_state(self, episode_id: str) -> NDArray[np.float32]:
        """The proprioception of the episode's Reset, float32 (dimensions,)."""
        return self._states[episode_id]

    def given_before(self, item: StepItem) -> NDArray[np.float32]:
        """The caller's last action before this chunk, float32 (dimensions,); at the start the reset state."""
        return self._given[item.episode_id][item.chunk_index]

    def target_before(self, item: StepItem) -> NDArray[np.float32]:
        """The executed target before this chunk as the contract has it, float32 (dimensions,)."""
        return self._targets[item.episode_id][item.chunk_index]

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        """Opens episodes, and remembers the states they start in."""
        replies = self.inner.reset(items)
        for reply in replies:
            if isinstance(reply, ResetReply) and reply.episode_id not in self._states:
                self._states[reply.episode_id] = reply.proprioception
                self._targets[reply.episode_id] = {0: reply.proprioception}
                self._given[reply.episode_id] = {0: reply.proprioception}
        return replies

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        """Sends the distorted actions, and reports the given ones."""
        known = [self._known(item) for item in items]
        sent = [
            replace(item, actions=np.ascontiguousarray(self.distort(item, items), np.float32)) if fine else item
            for item, fine in zip(items, known, strict=True)
        ]
        return [
            self._report(item, reply) if fine and isinstance(reply, StepReply) else reply
            for item, fine, reply in zip(items, known, self.inner.step(sent), strict=True)
        ]

    def _known(self, item: StepItem) -> bool:
        """Whether the item is one that a server would run; others pass unchanged and get the server's own error."""
        shape = (self.interface.timing.chunk_actions, self.interface.action_dimensions)
        fits = item.actions.shape == shape and bool(np.isfinite(item.actions).all())
        return fits and item.chunk_index in self._targets.get(item.episode_id, {})

    def _report(self, item: StepItem, reply: StepReply) -> StepReply:
        executed = execute(item.actions, self.target_before(item), self.interface.action)
        self._targets[item.episode_id][item.chunk_index + 1] = executed.actions[-1].copy()
        self._given[item.episode_id][item.chunk_index + 1] = item.actions[-1].copy()
        measured = self.interface.observation.proprioception == "measured"
        return replace(
            reply,
            executed_actions=executed.actions,
            clipped_count=executed.clipped_count,
            proprioception=reply.proprioception if measured else executed.actions[-1].copy(),
        )

    def close_episodes(self, episode_ids: Sequence[str]) -> int:
        """Frees episodes, and forgets them."""
        for name in episode_ids:
            self._targets.pop(name, None)
            self._given.pop(name, None)
            self._states.pop(name, None)
        return self.inner.close_episodes(episode_ids)


def dimensions_of(interface: Interface, unit: str, arm: str = "") -> list[int]:
    """Positions of the action's numbers in that unit (and of that arm)."""
    return [
        number
        for number, dimension in enumerate(interface.action.dimensions)
        if dimension.unit == unit and arm in ("", dimension.arm)
    ]
