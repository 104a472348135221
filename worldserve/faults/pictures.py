"""Faults of what a frame shows: which pixels, and which moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from worldserve.contract import Interface
from worldserve.faults.layer import Calls, Layer
from worldserve.messages import FrameSelection, ItemError, ResetItem, ResetReply, StepItem, StepReply

ZOOM = 1.25
LEAK_SHARE = 0.25

Frames = NDArray[np.uint8]


def zoomed(frames: Frames, factor: float) -> Frames:
    """The middle of frames (..., height, width, 3) enlarged to the whole, nearest pixel; below 1: edges repeated."""
    height, width = frames.shape[-3:-1]
    rows, columns = (
        np.clip(np.round((np.arange(size) - (size - 1) / 2) / factor + (size - 1) / 2), 0, size - 1).astype(int)
        for size in (height, width)
    )
    return np.ascontiguousarray(frames[..., rows[:, None], columns[None], :])


class PictureLayer(Layer):
    """The same change of every frame, (..., height, width, 3)."""

    def draw(self, frames: Frames) -> Frames:
        """The changed frames."""
        raise NotImplementedError

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        """Opens episodes."""
        replies = self.inner.reset(items)
        return [r if isinstance(r, ItemError) else replace(r, frame=self.draw(r.frame)) for r in replies]

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        """Runs chunks."""
        replies = self.inner.step(items)
        return [r if isinstance(r, ItemError) else replace(r, frames=self.draw(r.frames)) for r in replies]


class ColoursSwapped(PictureLayer):
    """Blue first."""

    def draw(self, frames: Frames) -> Frames:
        """Red and blue exchanged."""
        return np.ascontiguousarray(frames[..., ::-1])


class ImageFlipped(PictureLayer):
    """Left is right."""

    def draw(self, frames: Frames) -> Frames:
        """Mirrored."""
        return np.ascontiguousarray(frames[..., ::-1, :])


class ImageUpsideDown(PictureLayer):
    """Row 0 is at the bottom."""

    def draw(self, frames: Frames) -> Frames:
        """Rows reversed."""
        return np.ascontiguousarray(frames[..., ::-1, :, :])


class ImageScaled(PictureLayer):
    """A crop in the place of the whole picture."""

    def draw(self, frames: Frames) -> Frames:
        """Enlarged by a quarter."""
        return zoomed(frames, ZOOM)


class FrameOffset(Layer):
    """Frame k shows the world before action k, not after it."""

    def __init__(self, inner: Calls, interface: Interface) -> None:
        super().__init__(inner, interface)
        self._before: dict[str, dict[int, Frames]] = {}

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        """Opens episodes."""
        replies = self.inner.reset(items)
        for reply in replies:
            if isinstance(reply, ResetReply):
                self._before.setdefault(reply.episode_id, {0: reply.frame})
        return replies

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        """Runs chunks with every frame drawn, and returns each frame's predecessor."""
        every = [replace(item, frames=FrameSelection.every(1)) for item in items]
        replies = self.inner.step(every)
        return [
            r if isinstance(r, ItemError) else self._shifted(item, r) for item, r in zip(items, replies, strict=True)
        ]

    def _shifted(self, item: StepItem, reply: StepReply) -> StepReply:
        before = self._before.setdefault(item.episode_id, {})
        first = before.get(item.chunk_index, reply.frames[0])
        before[item.chunk_index + 1] = reply.frames[-1]
        late = np.concatenate([first[None], reply.frames[:-1]])
        count = len(item.actions)
        wanted = item.frames.frame_indices(reply.elapsed_steps - count, count)
        rows = [index - (reply.elapsed_steps - count) - 1 for index in wanted]
        return replace(reply, frames=late[rows], frame_indices=np.array(wanted, np.int32))

    def close_episodes(self, episode_ids: Sequence[str]) -> int:
        """Frees episodes."""
        for name in episode_ids:
            self._before.pop(name, None)
        return self.inner.close_episodes(episode_ids)


class EpisodesLeak(Layer):
    """What was drawn last for another open episode shines through."""

    def __init__(self, inner: Calls, interface: Interface) -> None:
        super().__init__(inner, interface)
        self._last: dict[str, Frames] = {}

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        """Runs chunks; a quarter of each frame is another episode's."""
        return [r if isinstance(r, ItemError) else self._mixed(r) for r in self.inner.step(items)]

    def _mixed(self, reply: StepReply) -> StepReply:
        others = [frame for name, frame in self._last.items() if name != reply.episode_id]
        if len(reply.frames):
            self._last.pop(reply.episode_id, None)
            self._last[reply.episode_id] = reply.frames[-1]
        if not others or not len(reply.frames):
            return reply
        mixed = (1 - LEAK_SHARE) * reply.frames + LEAK_SHARE * others[-1]
        return replace(reply, frames=np.round(mixed).astype(np.uint8))

    def close_episodes(self, episode_ids: Sequence[str]) -> int:
        """Frees episodes."""
        for name in episode_ids:
            self._last.pop(name, None)
        return self.inner.close_episodes(episode_ids)


class HistoryIgnored(Layer):
    """The frames of a chunk show its actions as if nothing had happened before."""

    def __init__(self, inner: Calls, interface: Interface) -> None:
        super().__init__(inner, interface)
        self._opened: dict[str, ResetItem] = {}

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        """Opens episodes, and remembers how."""
        self._opened |= {item.episode_id: item for item in items}
        return self.inner.reset(items)

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        """Runs chunks; frames of all but the first come from a fresh episode that runs this chunk alone."""
        replies = self.inner.step(items)
        return [
            self._forgetful(item, reply)
            if isinstance(reply, StepReply) and item.chunk_index > 0 and item.episode_id in self._opened
            else reply
            for item, reply in zip(items, replies, strict=True)
        ]

    def _forgetful(self, item: StepItem, reply: StepReply) -> StepReply | ItemError:
        name = f"{item.episode_id[:100]}/alone-{item.chunk_index}"
        try:
            [opened] = self.inner.reset([replace(self._opened[item.episode_id], episode_id=name)])
            if isinstance(opened, ItemError):
                return opened
            [drawn] = self.inner.step([replace(item, episode_id=name, chunk_index=0)])
        finally:
            self.inner.close_episodes([name])
        return drawn if isinstance(drawn, ItemError) else replace(reply, frames=drawn.frames)

    def close_episodes(self, episode_ids: Sequence[str]) -> int:
        """Frees episodes."""
        for name in episode_ids:
            self._opened.pop(name, None)
        return self.inner.close_episodes(episode_ids)
