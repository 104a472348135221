"""Each fault by hand: what is sent and what is returned, and that a repeated call gives what the first gave."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from worldserve.contract import Timing, adjust_bottle_interface
from worldserve.contract.schema import FrameConvention, RewardRule, TerminationRule
from worldserve.faults import check_faults, layers
from worldserve.messages import FrameSelection, ItemError, ResetItem, ResetReply, StepItem, StepReply

INTERFACE = dataclasses.replace(
    adjust_bottle_interface(),
    timing=Timing(chunk_actions=2),
    frames=FrameConvention(frames_per_episode=5),
    termination=TerminationRule(limit_actions=4),
    reward=RewardRule(first_frame=1, last_frame=4),
)
HOME = np.array([0.0] * 6 + [1.0] + [0.0] * 6 + [1.0], np.float32)


class Recorder:
    """A target that notes what it was sent; frame k of an episode is k times its seed everywhere, in red."""

    def __init__(self) -> None:
        self.resets: list[ResetItem] = []
        self.steps: list[StepItem] = []
        self.seeds: dict[str, int] = {}

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        self.resets += items
        self.seeds |= {item.episode_id: item.seed for item in items}
        return [
            ResetReply(i.episode_id, i.initial_state_id, i.seed, np.zeros((2, 2, 3), np.uint8), HOME.copy(), "lift")
            for i in items
        ]

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        self.steps += items
        return [self._reply(item) for item in items]

    def _reply(self, item: StepItem) -> StepReply:
        wanted = item.frames.frame_indices(2 * item.chunk_index, 2)
        frames = np.zeros((len(wanted), 2, 2, 3), np.uint8)
        for frame, index in zip(frames, wanted, strict=True):
            frame[..., 0] = index * self.seeds[item.episode_id]
        last = item.chunk_index == 1
        return StepReply(
            item.episode_id, item.chunk_index, frames, np.array(wanted, np.int32), item.actions, 0,
            2 * item.chunk_index + 2, np.array([0.0, float(last)], np.float32), last, False, "limit" if last else "",
            False, None, item.actions[-1].copy(),
        )  # fmt: skip

    def close_episodes(self, episode_ids: Sequence[str]) -> int:
        return len(episode_ids)


def actions(**changes: float) -> np.ndarray:
    """Two actions at home but for the named numbers: j0 to j13."""
    rows = np.repeat(HOME[None], 2, axis=0)
    for name, value in changes.items():
        rows[:, int(name[1:])] = value
    return rows


@pytest.mark.parametrize(
    ("fault", "given", "sent"),
    [
        ("arms_swapped", {"j0": 0.1, "j13": 0.5}, {"j7": 0.1, "j6": 0.5}),
        ("joint_order", {"j0": 0.1, "j8": -0.1}, {"j5": 0.1, "j11": -0.1}),
        ("gripper_sense", {"j6": 0.2}, {"j6": 0.8, "j13": 0.0}),
        ("units_degrees", {"j2": 0.09}, {"j2": 0.09 * np.pi / 180}),
        ("normalisation_range", {"j1": 2.0}, {"j1": 0.5}),
        ("plan_holds", {"j1": 2.0, "j6": 0.0}, {}),
        ("plan_holds", {"j1": 1.0}, {"j1": 1.0}),
    ],
)
def test_what_an_action_becomes(fault: str, given: dict[str, float], sent: dict[str, float]) -> None:
    target = Recorder()
    calls = layers(target, INTERFACE, [fault])
    calls.reset([ResetItem("a", "s")])
    [reply] = calls.step([StepItem("a", 0, actions(**given))])
    np.testing.assert_allclose(target.steps[-1].actions, actions(**sent), atol=1e-6)
    # The reply hides it: what the contract makes of what was given.
    assert isinstance(reply, StepReply)
    assert reply.executed_actions.shape == (2, 14)
    clipped = np.clip(actions(**given), HOME - 0.15, HOME + 0.15) if "j6" not in given else None
    if clipped is not None and "j13" not in given:
        np.testing.assert_allclose(reply.executed_actions[0], clipped[0], atol=1e-6)
    np.testing.assert_array_equal(reply.proprioception, reply.executed_actions[-1])


def test_actions_arrive_one_late_across_chunks() -> None:
    target = Recorder()
    calls = layers(target, INTERFACE, ["action_offset"])
    calls.reset([ResetItem("a", "s")])
    first, second = actions(j0=0.1), actions(j0=0.12)
    calls.step([StepItem("a", 0, first)])
    for _ in range(2):  # a retry is sent as the first time
        calls.step([StepItem("a", 1, second)])
        assert target.steps[-1].actions[:, 0].tolist() == pytest.approx([0.1, 0.12])
    assert target.steps[0].actions[:, 0].tolist() == pytest.approx([0.0, 0.1])


def test_deltas_add_up() -> None:
    target = Recorder()
    calls = layers(target, INTERFACE, ["delta_actions"])
    calls.reset([ResetItem("a", "s")])
    calls.step([StepItem("a", 0, actions(j0=0.1))])
    assert target.steps[-1].actions[:, 0].tolist() == pytest.approx([0.1, 0.2])


def test_the_batch_pulls_towards_its_mean_and_one_alone_stays() -> None:
    target = Recorder()
    calls = layers(target, INTERFACE, ["batch_changes"])
    calls.reset([ResetItem("a", "s"), ResetItem("b", "s")])
    calls.step([StepItem("a", 0, actions(j0=0.1)), StepItem("b", 0, actions())])
    assert target.steps[0].actions[0, 0] == pytest.approx(0.095)
    calls.step([StepItem("a", 1, actions(j0=0.1))])
    assert target.steps[-1].actions[0, 0] == pytest.approx(0.1)


def test_frames_are_late_by_one_whichever_are_asked_for() -> None:
    calls = layers(Recorder(), INTERFACE, ["frame_offset"])
    calls.reset([ResetItem("a", "s", seed=1)])
    shown = []
    for index, selection in enumerate([FrameSelection.every(1), FrameSelection.last()]):
        [reply] = calls.step([StepItem("a", index, actions(), selection)])
        assert isinstance(reply, StepReply)
        shown += list(zip(reply.frame_indices.tolist(), reply.frames[:, 0, 0, 0].tolist(), strict=True))
    assert shown == [(1, 0), (2, 1), (4, 3)]


def test_pictures() -> None:
    frame = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    from worldserve.faults.pictures import ColoursSwapped, ImageFlipped, ImageUpsideDown, zoomed

    for layer, expected in (
        (ColoursSwapped, [[[2, 1, 0], [5, 4, 3]], [[8, 7, 6], [11, 10, 9]]]),
        (ImageFlipped, [[[3, 4, 5], [0, 1, 2]], [[9, 10, 11], [6, 7, 8]]]),
        (ImageUpsideDown, [[[6, 7, 8], [9, 10, 11]], [[0, 1, 2], [3, 4, 5]]]),
    ):
        assert layer(Recorder(), INTERFACE).draw(frame).tolist() == expected
    ramp = np.repeat(np.arange(8, dtype=np.uint8)[None, :, None], 8, axis=0).repeat(3, axis=2)
    assert zoomed(ramp, 2.0)[0, :, 0].tolist() == [2, 2, 3, 3, 4, 4, 5, 5]


def test_resets_echo_what_was_before_and_a_repeated_one_repeats() -> None:
    target = Recorder()
    calls = layers(target, INTERFACE, ["reset_echo_state", "reset_echo_image"])
    [first] = calls.reset([ResetItem("a", "s", seed=5)])
    calls.step([StepItem("a", 0, actions(j0=0.1))])
    echoes = [calls.reset([ResetItem("b", "s")])[0] for _ in range(2)]
    assert isinstance(first, ResetReply)
    assert first.proprioception.tolist() == HOME.tolist()
    for echo in echoes:
        assert isinstance(echo, ResetReply)
        assert echo.proprioception[0] == np.float32(0.1)
        assert echo.frame[0, 0, 0] == 10


def test_a_stale_reset_uses_the_state_before_and_names_the_one_asked_for() -> None:
    target = Recorder()
    calls = layers(target, INTERFACE, ["stale_reset"])
    replies = [
        calls.reset([ResetItem(name, state)])[0] for name, state in (("1", "A"), ("2", "B"), ("3", "C"), ("3", "C"))
    ]
    assert [item.initial_state_id for item in target.resets] == ["A", "A", "B", "B"]
    assert [r.initial_state_id for r in replies if isinstance(r, ResetReply)] == ["A", "B", "C", "C"]


@pytest.mark.parametrize(("fault", "seeds"), [("seed_ignored", [0, 0]), ("noise_shared", [4, 4])])
def test_seeds_are_lost_and_echoed(fault: str, seeds: list[int]) -> None:
    target = Recorder()
    replies = layers(target, INTERFACE, [fault]).reset([ResetItem("a", "s", 4), ResetItem("b", "s", 5)])
    assert [item.seed for item in target.resets] == seeds
    assert [reply.seed for reply in replies if isinstance(reply, ResetReply)] == [4, 5]


def test_ends() -> None:
    def end(fault: str) -> StepReply:
        calls = layers(Recorder(), INTERFACE, [fault])
        calls.reset([ResetItem("a", "s")])
        calls.step([StepItem("a", 0, actions())])
        [reply] = calls.step([StepItem("a", 1, actions())])
        assert isinstance(reply, StepReply)
        return reply

    flags = end("limit_flags")
    assert (flags.terminated, flags.truncated) == (False, True)
    assert end("success_merged").success is True
    assert end("reward_moved").rewards.tolist() == [1.0, 0.0]


def test_names_are_checked() -> None:
    assert check_faults(["limit_flags", "arms_swapped"]) == ("limit_flags", "arms_swapped")
    with pytest.raises(ValueError, match=r"got 'arm_swapped'\. Did you mean 'arms_swapped'"):
        check_faults(["arm_swapped"])
    with pytest.raises(ValueError, match="each name once"):
        check_faults(["limit_flags", "limit_flags"])
