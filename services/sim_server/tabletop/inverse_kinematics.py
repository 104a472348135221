"""Inverse kinematics of one X5 arm by damped least squares on the geometric Jacobian; deterministic.

Method: Levenberg-Marquardt steps on the pose error (Buss, "Introduction to inverse kinematics with Jacobian
transpose, pseudoinverse and damped least squares methods", 2004), from a given start, so the same start and target
give the same branch. The numbers come from `worldserve.kinematics`, the one place that holds the joint table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from worldserve.kinematics import TOOL_CENTRE_M, X5_JOINTS, arm_link_frames

Float64Array = NDArray[np.float64]
# A radian of orientation counts as much as this many metres of position.
_METRES_PER_RADIAN = 0.25


class UnreachableError(ValueError):
    """No joint angles within the limits bring the tool to the asked pose.

    What to do: Ask for a pose within the arm's reach, or choose another initial state.
    """


def solve(
    arm: str,
    position_m: Float64Array,
    rotation: Float64Array,
    start_rad: Float64Array,
    limits_rad: Float64Array,
    tolerance_m: float = 1e-4,
    iterations: int = 80,
) -> Float64Array:
    """Joint angles that bring the tool centre to a pose.

    Args:
        arm: "left" or "right".
        position_m: (3,) tool centre in the world.
        rotation: (3, 3) of link 6 (x the approach direction, y the direction in which the fingers close).
        start_rad: (6,) first guess; it decides the branch.
        limits_rad: (6, 2) lower and upper limits.
        tolerance_m: largest error accepted, one radian counting as 0.25 m.
        iterations: Levenberg-Marquardt steps at most.

    Returns:
        float64 (6,), within the limits.

    Raises:
        UnreachableError: when the error stays above the tolerance.
    """
    joints = np.clip(np.asarray(start_rad, np.float64), limits_rad[:, 0], limits_rad[:, 1])
    error, jacobian = _error_and_jacobian(arm, joints, position_m, rotation)
    damping = 1e-4
    for _ in range(iterations):
        if np.linalg.norm(error) < 0.1 * tolerance_m:
            break
        step = np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(6), jacobian.T @ error)
        step *= min(1.0, 0.3 / max(float(np.abs(step).max()), 1e-12))
        trial = np.clip(joints + step, limits_rad[:, 0], limits_rad[:, 1])
        trial_error, trial_jacobian = _error_and_jacobian(arm, trial, position_m, rotation)
        if np.linalg.norm(trial_error) < np.linalg.norm(error):
            joints, error, jacobian, damping = trial, trial_error, trial_jacobian, max(damping / 5, 1e-9)
        else:
            damping *= 8
    if np.linalg.norm(error) > tolerance_m:
        raise UnreachableError(
            f"{arm} arm: expected a pose in reach; {np.round(position_m, 3).tolist()} m missed by"
            f" {1e3 * float(np.linalg.norm(error)):.1f} mm; move the target toward the arm's base, or start elsewhere"
        )
    return joints


def _error_and_jacobian(
    arm: str, joints: Float64Array, position_m: Float64Array, rotation: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Weighted pose error (6,) and its Jacobian (6, 6) with respect to the joints."""
    frames = arm_link_frames(arm, joints)
    tool = frames[6, :3, 3] + TOOL_CENTRE_M * frames[6, :3, 0]
    error = np.concatenate([position_m - tool, _METRES_PER_RADIAN * _rotation_vector(rotation @ frames[6, :3, :3].T)])
    jacobian = np.empty((6, 6))
    for index, joint in enumerate(X5_JOINTS):
        # A joint turns about its axis in its own link's frame: rotating about an axis does not move that axis.
        axis = frames[index + 1, :3, :3] @ np.asarray(joint.axis)
        jacobian[:3, index] = np.cross(axis, tool - frames[index + 1, :3, 3])
        jacobian[3:, index] = _METRES_PER_RADIAN * axis
    return error, jacobian


def _rotation_vector(matrix: Float64Array) -> Float64Array:
    """Axis times angle of a rotation matrix, (3,); angles up to nearly pi."""
    skew = np.array([matrix[2, 1] - matrix[1, 2], matrix[0, 2] - matrix[2, 0], matrix[1, 0] - matrix[0, 1]])
    sine, cosine = 0.5 * float(np.linalg.norm(skew)), 0.5 * (float(np.trace(matrix)) - 1.0)
    angle = float(np.arctan2(sine, cosine))
    return 0.5 * skew if sine < 1e-9 else skew * (angle / (2.0 * sine))
