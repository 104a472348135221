"""The X5 chain: home, one joint at a time, shapes, refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldserve.kinematics import (
    BASE_POSITIONS_M,
    arm_forward_kinematics,
    arm_link_frames,
    base_frame,
    end_effector_poses,
    euler_xyz,
    rotation_from_rpy,
    tool_centre,
)

ANGLE = st.floats(-3.1, 3.1)


@pytest.mark.parametrize(("arm", "home_m"), [("left", (-0.296, -0.314, 0.942)), ("right", (0.308, -0.313, 0.941))])
def test_home_is_where_robotwin_puts_link_six(arm: str, home_m: tuple[float, float, float]) -> None:
    positions, _ = arm_forward_kinematics(arm, np.zeros(6))
    np.testing.assert_allclose(positions, home_m, atol=3e-3)


def test_the_tool_centre_lies_ahead_of_link_six_which_looks_away_from_the_robot() -> None:
    positions, _ = arm_forward_kinematics("left", np.zeros(6))
    np.testing.assert_allclose(tool_centre("left", np.zeros(6)) - positions, (0.0, 0.12, 0.0), atol=3e-3)


@pytest.mark.parametrize("arm", ["left", "right"])
def test_the_first_joint_turns_the_arm_about_the_vertical_through_its_base(arm: str) -> None:
    home, _ = arm_forward_kinematics(arm, np.zeros(6))
    turned, _ = arm_forward_kinematics(arm, (0.5, 0.0, 0.0, 0.0, 0.0, 0.0))
    base = np.array(BASE_POSITIONS_M[arm])
    expected = base + rotation_from_rpy(0.0, 0.0, 0.5) @ (home - base)
    np.testing.assert_allclose(turned, expected, atol=1e-12)


def test_the_last_joint_moves_no_position() -> None:
    home, _ = arm_forward_kinematics("left", np.zeros(6))
    rolled, _ = arm_forward_kinematics("left", (0.0, 0.0, 0.0, 0.0, 0.0, 1.0))
    np.testing.assert_allclose(rolled, home, atol=1e-12)


@given(st.lists(ANGLE, min_size=6, max_size=6))
def test_every_frame_is_a_rigid_motion(joints: list[float]) -> None:
    frames = arm_link_frames("right", joints)
    rotations = frames[..., :3, :3]
    products = rotations @ np.swapaxes(rotations, -1, -2)
    np.testing.assert_allclose(products, np.broadcast_to(np.eye(3), (7, 3, 3)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(rotations), 1.0)
    np.testing.assert_array_equal(frames[0], base_frame("right"))


@given(ANGLE, st.floats(-1.5, 1.5), ANGLE)
def test_euler_angles_invert_the_rotation(roll: float, pitch: float, yaw: float) -> None:
    np.testing.assert_allclose(euler_xyz(rotation_from_rpy(roll, pitch, yaw)), (roll, pitch, yaw), atol=1e-9)


def test_leading_axes_are_kept_and_rows_are_independent() -> None:
    joints = np.random.default_rng(1).uniform(-1.0, 1.0, (2, 3, 6))
    positions, rotations = arm_forward_kinematics("left", joints)
    assert positions.shape == (2, 3, 3)
    assert rotations.shape == (2, 3, 3, 3)
    np.testing.assert_array_equal(positions[1, 2], arm_forward_kinematics("left", joints[1, 2])[0])


def test_poses_are_left_then_right_each_with_its_own_gripper() -> None:
    targets = np.zeros((2, 14))
    targets[:, 6], targets[:, 13] = 0.25, 0.75
    poses = end_effector_poses(targets)
    assert poses.shape == (2, 14)
    assert poses[0, 0] < 0 < poses[0, 7]
    assert poses[0, 6] == 0.25
    assert poses[0, 13] == 0.75


@pytest.mark.parametrize("joints", [np.zeros(7), np.zeros((3, 14)), np.array(0.0)])
def test_a_wrong_shape_is_refused(joints: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"joints_rad: expected \(\.\.\., 6\); got"):
        arm_forward_kinematics("left", joints)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_angle_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        arm_forward_kinematics("left", [bad, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_gripper_is_refused(bad: float) -> None:
    targets = np.zeros(14)
    targets[13] = bad
    with pytest.raises(ValueError, match="finite"):
        end_effector_poses(targets)


def test_an_unknown_arm_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="arm: expected one of left, right; got 'middle'"):
        arm_forward_kinematics("middle", np.zeros(6))
