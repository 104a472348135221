"""Fixed actions in a target: what may pass is sent again, what was run is checked, long replies are streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from services.trainer import action_runs
from services.trainer.action_runs import ActionRun, every_frame, run_actions
from tests.services.trainer.fork_world import ForkWorld, episode
from worldserve.contract import adjust_bottle
from worldserve.messages import FrameSelection, ItemError, ItemFailedError, ResetItem, ResetReply, StepItem, StepReply

RUNS = [ActionRun(e.initial_state_id, e.seed, e.executed_actions) for e in (episode(0), episode(1, error_mm=9.0))]


def error(code: str) -> ItemError:
    return ItemError(code, "REASON", "items[0]", "expected", "got", "advice")


class TroubledWorld(ForkWorld):
    """Answers its first calls with errors."""

    def __init__(self, code: str, reset_errors: int = 0, step_errors: int = 0) -> None:
        super().__init__(4.0)
        self.code, self.reset_errors, self.step_errors = code, reset_errors, step_errors

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        if self.reset_errors:
            self.reset_errors -= 1
            return [error(self.code), *super().reset(items[1:])]
        return super().reset(items)

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        if self.step_errors:
            self.step_errors -= 1
            return [*super().step(items[:-1]), error(self.code)]
        return super().step(items)


def test_errors_that_pass_do_not_end_a_run() -> None:
    world = TroubledWorld("UNAVAILABLE", reset_errors=1, step_errors=2)
    assert [outcome.success for outcome in run_actions(world, RUNS, 50)] == [True, False]
    assert world.open_episodes == set()


def test_errors_that_stay_are_raised_and_no_episode_stays_open() -> None:
    world = TroubledWorld("INVALID_ARGUMENT", step_errors=1)
    with pytest.raises(ItemFailedError) as raised:
        run_actions(world, RUNS, 50)
    assert [found.code for found in raised.value.errors] == ["INVALID_ARGUMENT"]
    assert world.open_episodes == set()


def test_actions_that_were_not_run_as_sent_are_an_error() -> None:
    class Clipping(ForkWorld):
        def _step(self, item: StepItem) -> StepReply:
            return replace(super()._step(item), executed_actions=np.clip(item.actions, 0.0, 0.5))

    with pytest.raises(ItemFailedError, match="ACTIONS_CHANGED"):
        run_actions(Clipping(4.0), RUNS, 50)


def test_chunks_above_a_replys_limit_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Streaming(ForkWorld):
        def _step(self, item: StepItem) -> StepReply:
            assert item.frames.stream
            return super()._step(replace(item, frames=FrameSelection.none()))

        def read_frames(self, episode_id: str, chunk_index: int) -> Iterator[tuple[int, np.ndarray]]:
            for number in range(50 * chunk_index + 1, 50 * chunk_index + 51):
                yield number, np.full((16, 16, 3), number, np.uint8)

    interface = adjust_bottle("simulator", "fork-world", {}).interface
    assert not every_frame(interface).stream
    monkeypatch.setattr(action_runs, "INLINE_FRAME_BYTES", 1000)
    [outcome, _] = run_actions(Streaming(4.0), RUNS, 50, every_frame(interface))
    np.testing.assert_array_equal(outcome.frames[:, 0, 0, 0], np.arange(201))


@pytest.mark.parametrize("lengths", [(200, 150), (120, 120)])
def test_lengths_that_differ_or_are_no_whole_chunks_are_refused(lengths: tuple[int, int]) -> None:
    runs = [replace(run, actions=run.actions[:length]) for run, length in zip(RUNS, lengths, strict=True)]
    with pytest.raises(ValueError, match="one length in whole chunks of 50"):
        run_actions(ForkWorld(4.0), runs, 50)
