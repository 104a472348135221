"""Fixed action sequences run in a target, without frames unless they are wanted: what `worldserve forks` asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.trainer.plans import unique_run_name
from services.trainer.rollout import Client
from worldserve.messages import FrameSelection, ResetItem, ResetReply, StepItem, StepReply, Verdict, raise_for_errors


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


def run_actions(
    client: Client, runs: Sequence[ActionRun], chunk_actions: int, *, frames: bool = False
) -> list[ActionOutcome]:
    """Runs episodes of one length side by side, in order; none stays open. `Replay` would draw every frame.

    Raises:
        ItemFailedError: when one could not be run.
        ValueError: for lengths that differ or are no whole chunks; nothing was sent.
    """
    lengths = {len(run.actions) for run in runs}
    if len(lengths) != 1 or any(length % chunk_actions or not length for length in lengths):
        raise ValueError(
            f"actions: expected episodes of one length in whole chunks of {chunk_actions}; got {sorted(lengths)}"
        )
    [length] = lengths
    selection = FrameSelection.every(1) if frames else FrameSelection.none()
    names = [f"{unique_run_name('forks')}/{number}" for number in range(len(runs))]
    replies: list[list[StepReply]] = []
    try:
        items = [ResetItem(name, run.initial_state_id, run.seed) for name, run in zip(names, runs, strict=True)]
        opened = raise_for_errors(client.reset(items))
        for chunk in range(length // chunk_actions):
            part = slice(chunk * chunk_actions, (chunk + 1) * chunk_actions)
            steps = [StepItem(name, chunk, run.actions[part], selection) for name, run in zip(names, runs, strict=True)]
            replies.append(raise_for_errors(client.step(steps)))
    finally:
        client.close_episodes(names)
    return [ActionOutcome(reset, column) for reset, column in zip(opened, zip(*replies, strict=True), strict=True)]
