"""Faults of an episode's life: how it starts, with which noise, when it ends, and what its end is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from worldserve.contract import Interface
from worldserve.faults.layer import Calls, Layer, dimensions_of
from worldserve.messages import ItemError, ResetItem, ResetReply, StepItem, StepReply


class _Remembering(Layer):
    """Keeps what the last Step and the last Reset returned; a repeated Reset returns what the first one did."""

    def __init__(self, inner: Calls, interface: Interface) -> None:
        super().__init__(inner, interface)
        self._replies: dict[str, ResetReply] = {}
        self.last_state: NDArray[np.float32] | None = None
        self.last_frame: NDArray[np.uint8] | None = None

    def changed(self, reply: ResetReply) -> ResetReply:
        """The distorted reply."""
        raise NotImplementedError

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        """Opens episodes."""
        replies: list[ResetReply | ItemError] = []
        for reply in self.inner.reset(items):
            if isinstance(reply, ResetReply):
                reply = self._replies.setdefault(reply.episode_id, self.changed(reply))
            replies.append(reply)
        return replies

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        """Runs chunks."""
        replies = self.inner.step(items)
        for reply in replies:
            if isinstance(reply, StepReply):
                self.last_state = reply.proprioception
                self.last_frame = reply.frames[-1] if len(reply.frames) else self.last_frame
        return replies

    def close_episodes(self, episode_ids: Sequence[str]) -> int:
        """Frees episodes."""
        for name in episode_ids:
            self._replies.pop(name, None)
        return self.inner.close_episodes(episode_ids)


class ResetEchoState(_Remembering):
    """Reset reports the last command of the episode before, not the state of the new scene."""

    def changed(self, reply: ResetReply) -> ResetReply:
        """The state replaced."""
        return reply if self.last_state is None else replace(reply, proprioception=self.last_state.copy())


class ResetEchoImage(_Remembering):
    """Reset returns the last frame of the episode before."""

    def changed(self, reply: ResetReply) -> ResetReply:
        """The frame replaced."""
        return reply if self.last_frame is None else replace(reply, frame=self.last_frame.copy())


class StaleReset(Layer):
    """From the second Reset on, the scene is that of the Reset before; the reply names the one asked for."""

    def __init__(self, inner: Calls, interface: Interface) -> None:
        super().__init__(inner, interface)
        self._last_state_id = ""
        self._used: dict[str, str] = {}

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        """Opens episodes in old scenes."""
        sent = []
        for item in items:
            used = self._used.setdefault(item.episode_id, self._last_state_id or item.initial_state_id)
            self._last_state_id = item.initial_state_id
            sent.append(replace(item, initial_state_id=used))
        return [
            r if isinstance(r, ItemError) else replace(r, initial_state_id=item.initial_state_id)
            for item, r in zip(items, self.inner.reset(sent), strict=True)
        ]

    def close_episodes(self, episode_ids: Sequence[str]) -> int:
        """Frees episodes."""
        for name in episode_ids:
            self._used.pop(name, None)
        return self.inner.close_episodes(episode_ids)


class SeedIgnored(Layer):
    """Every episode gets noise seed 0; the reply names the one asked for."""

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        """Opens episodes with one noise."""
        replies = self.inner.reset([replace(item, seed=self.seed_for(item, items)) for item in items])
        return [
            r if isinstance(r, ItemError) else replace(r, seed=item.seed)
            for item, r in zip(items, replies, strict=True)
        ]

    def seed_for(self, item: ResetItem, items: Sequence[ResetItem]) -> int:
        """The seed that is used."""
        return 0


class NoiseShared(SeedIgnored):
    """All episodes of one Reset get the noise of its first."""

    def __init__(self, inner: Calls, interface: Interface) -> None:
        super().__init__(inner, interface)
        self._used: dict[str, int] = {}

    def seed_for(self, item: ResetItem, items: Sequence[ResetItem]) -> int:
        """The first item's seed; a Reset that is repeated, with others or alone, keeps what it got."""
        return self._used.setdefault(item.episode_id, items[0].seed)

    def close_episodes(self, episode_ids: Sequence[str]) -> int:
        """Frees episodes."""
        for name in episode_ids:
            self._used.pop(name, None)
        return self.inner.close_episodes(episode_ids)


class EarlyEnd(Layer):
    """An episode ends at its first success.

    Where the target tells no success (a world model), a gripper that is closed in the second half is taken for one.
    """

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        """Runs chunks."""
        return [r if isinstance(r, ItemError) else self._ended(r) for r in self.inner.step(items)]

    def _ended(self, reply: StepReply) -> StepReply:
        if reply.terminated or reply.truncated or not self._succeeded(reply):
            return reply
        rewards = np.zeros_like(reply.rewards)
        rewards[-1] = 1.0
        return replace(reply, terminated=True, end_reason="success", rewards=rewards)

    def _succeeded(self, reply: StepReply) -> bool:
        if reply.success is not None:
            return reply.success
        grippers = dimensions_of(self.interface, "fraction")
        late = reply.elapsed_steps > self.interface.termination.limit_actions / 2
        return late and bool((reply.executed_actions[-1, grippers] < 0.5).any())


class LimitFlags(Layer):
    """The end at the limit carries the other flag: a termination is called a truncation, or the reverse."""

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        """Runs chunks."""
        return [
            replace(r, terminated=r.truncated, truncated=r.terminated)
            if isinstance(r, StepReply) and r.end_reason == "limit"
            else r
            for r in self.inner.step(items)
        ]


class SuccessMerged(Layer):
    """Whoever reaches the end has succeeded: `success` is `terminated`."""

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        """Runs chunks."""
        return [
            replace(r, success=True) if isinstance(r, StepReply) and (r.terminated or r.truncated) else r
            for r in self.inner.step(items)
        ]


class RewardMoved(Layer):
    """The reward stands at the last chunk's first action, not at its last."""

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        """Runs chunks."""
        return [
            replace(r, rewards=np.ascontiguousarray(r.rewards[::-1])) if isinstance(r, StepReply) else r
            for r in self.inner.step(items)
        ]
