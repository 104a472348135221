"""Inverse kinematics against the forward kinematics of the same joint table."""

from __future__ import annotations

import numpy as np
import pytest

from services.sim_server.tabletop.inverse_kinematics import UnreachableError, solve
from services.sim_server.tabletop.robot import JOINT_LIMITS_RAD
from worldserve.kinematics import arm_forward_kinematics, tool_centre


@pytest.mark.parametrize("arm", ["left", "right"])
def test_meets_reachable_poses_within_a_tenth_of_a_millimetre(arm: str) -> None:
    generator = np.random.default_rng(3)
    middle = np.array([0.3, 1.4, 1.0, 0.0, 0.1, 0.0])
    for _ in range(20):
        wanted = middle + generator.uniform(-0.3, 0.3, 6)
        _, rotation = arm_forward_kinematics(arm, wanted)
        found = solve(arm, tool_centre(arm, wanted), rotation, middle, JOINT_LIMITS_RAD)
        np.testing.assert_allclose(tool_centre(arm, found), tool_centre(arm, wanted), atol=1e-4)
        np.testing.assert_allclose(arm_forward_kinematics(arm, found)[1], rotation, atol=1e-3)
        assert (found >= JOINT_LIMITS_RAD[:, 0]).all()
        assert (found <= JOINT_LIMITS_RAD[:, 1]).all()


def test_same_start_same_solution() -> None:
    rotation = arm_forward_kinematics("left", np.full(6, 0.4))[1]
    position = tool_centre("left", np.full(6, 0.4))
    first, second = (solve("left", position, rotation, np.full(6, 0.2), JOINT_LIMITS_RAD) for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_out_of_reach_says_by_how_much() -> None:
    with pytest.raises(UnreachableError, match=r"left arm: expected a pose in reach; .* missed by [0-9.]+ mm"):
        solve("left", np.array([0.9, 0.9, 1.0]), np.eye(3), np.full(6, 0.3), JOINT_LIMITS_RAD)
