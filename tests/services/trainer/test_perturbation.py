"""Perturbed actions: the size is what it says, the rest of the episode stays what it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.trainer.perturbation import (
    FADE_ACTIONS,
    HOLD_ACTIONS,
    KINDS,
    Grasp,
    Kind,
    draw_perturbation,
    envelope,
    executed,
    find_grasp,
    perturbation_generator,
)
from worldserve.contract import adjust_bottle_interface
from worldserve.kinematics import tool_centre

GRASP = Grasp("right", 60, 70)
LAST = GRASP.end + HOLD_ACTIONS + FADE_ACTIONS


def episode(arm: int = 1) -> np.ndarray:
    """An arm goes down, closes its gripper from action 60 to 70, and goes up; float32 (200, 14)."""
    actions = np.zeros((200, 14), np.float32)
    actions[:, [6, 13]] = 1.0
    down = np.interp(np.arange(200), [0, 60, 80, 140], [0, 1, 1, 0])
    actions[:, 7 * arm : 7 * arm + 6] = np.outer(down, [0.3, 1.8, 1.6, 0.9, 0.2, 0.4])
    actions[:, 7 * arm + 6] = np.interp(np.arange(200), [57.5, 72.5], [1, 0])
    return actions


def perturb(kind: Kind, size: float, name: str = "a") -> tuple[np.ndarray, np.ndarray]:
    actions = episode()
    perturbation = draw_perturbation(actions, GRASP, (kind,), perturbation_generator(0, name))
    return actions, perturbation.apply(actions, size)


def displacement_mm(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    moved = tool_centre("right", after[:, 7:13]) - tool_centre("right", before[:, 7:13])
    return np.asarray(1e3 * np.linalg.norm(moved, axis=1))


@pytest.mark.parametrize(("arm", "name"), [(0, "left"), (1, "right")])
def test_the_grasp_is_by_the_arm_that_moves_while_its_gripper_closes(arm: int, name: str) -> None:
    grasp = find_grasp(episode(arm))
    assert grasp is not None
    assert grasp.arm == name
    assert 60 <= grasp.begin <= 62
    assert 69 <= grasp.end <= 71


def test_an_episode_without_a_closing_gripper_has_no_grasp() -> None:
    actions = episode()
    actions[:, 13] = 1.0
    assert find_grasp(actions) is None


def test_the_envelope_is_1_around_the_grasp_and_0_at_the_ends() -> None:
    shape = envelope(GRASP, 200)
    assert (shape[GRASP.begin - 1 : GRASP.end + HOLD_ACTIONS + 1] == 1).all()
    assert shape[0] < 0.001
    assert (shape[LAST:] == 0).all()
    assert (np.diff(shape[: GRASP.begin]) >= 0).all()


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("size", [4.0, 32.0])
def test_an_offset_displaces_the_tool_by_its_size_at_the_grasp(size: float, name: str) -> None:
    moved = displacement_mm(*perturb("offset", size, name))
    assert moved[GRASP.begin] == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("size", [4.0, 32.0])
def test_modes_displace_the_tool_by_their_size_at_most(size: float, name: str) -> None:
    moved = displacement_mm(*perturb("modes", size, name))
    assert moved.max() == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_grasping_arm_is_perturbed(kind: Kind) -> None:
    before, after = perturb(kind, 8)
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert after.dtype == np.float32


@pytest.mark.parametrize("kind", ["offset", "modes"])
def test_what_follows_the_lift_and_the_gripper_stay(kind: Kind) -> None:
    before, after = perturb(kind, 32)
    np.testing.assert_array_equal(before[LAST:], after[LAST:])
    np.testing.assert_array_equal(before[:, 13], after[:, 13])


@pytest.mark.parametrize(("later", "closed"), [(True, 78), (False, 62)])
def test_the_gripper_closes_later_or_earlier_by_its_size(later: bool, closed: int) -> None:
    actions = episode()
    drawn = draw_perturbation(actions, GRASP, ("gripper",), perturbation_generator(0, "a"))
    after = replace(drawn, later=later).apply(actions, 8)
    assert np.flatnonzero(after[:, 13] < 0.2)[0] == pytest.approx(closed, abs=1)
    np.testing.assert_array_equal(after[:, 7:13], actions[:, 7:13])


def test_the_same_seed_and_episode_give_the_same_bytes_and_others_do_not() -> None:
    once, again, other = (perturb("modes", 8, name)[1] for name in ("a", "a", "b"))
    np.testing.assert_array_equal(once, again)
    assert not np.array_equal(once, other)


def test_executed_actions_are_run_as_they_are() -> None:
    layout, start = adjust_bottle_interface().action, episode()[0]
    once = executed(perturb("offset", 150)[1], start, layout)
    np.testing.assert_array_equal(executed(once, start, layout), once)
