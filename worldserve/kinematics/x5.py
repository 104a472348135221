"""Forward kinematics of the two ARX X5-type arms of RoboTwin's aloha-agilex, in plain numpy.

World frame: x right, y away from the robot, z up, metres; angles in radians. The joint table and the bases are facts
of RoboTwin 2.0's robot description; the two small base yaws were measured on two real episodes, which forward
kinematics then meets within 6.3 mm (mean 2.3 mm) and 0.7 degrees (without them, 13 mm).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64Array = NDArray[np.float64]

ARMS = ("left", "right")
# Where the closed fingers hold, ahead of link 6 along its x axis.
TOOL_CENTRE_M = 0.12


@dataclass(frozen=True)
class Joint:
    """One revolute joint: its frame in the parent link (`origin_m`, roll-pitch-yaw `rpy_rad`) and its unit `axis`."""

    origin_m: tuple[float, float, float]
    rpy_rad: tuple[float, float, float]
    axis: tuple[float, float, float]


X5_JOINTS = (
    Joint((0.0, 0.0, 0.058), (0.0, 0.0, 0.0), (0.0, 0.0, 1.0)),
    Joint((0.025013, 0.0006, 0.042), (0.0, 0.0, 0.0), (0.0, 1.0, 0.0)),
    Joint((-0.26396, 0.00445, 0.0), (-np.pi, 0.0, -0.0159), (0.0, 1.0, 0.0)),
    Joint((0.246, -0.00025, -0.06), (0.0, 0.0, 0.0), (0.0, 1.0, 0.0)),
    Joint((0.06775, 0.0015, -0.0855), (0.0, 0.0, -0.0159), (0.0, 0.0, 1.0)),
    Joint((0.03095, 0.0, 0.0855), (-np.pi, 0.0, 0.0), (1.0, 0.0, 0.0)),
)

BASE_POSITIONS_M = {"left": (-0.297, -0.4195, 0.782), "right": (0.3063, -0.4185, 0.781)}
BASE_YAWS_RAD = {"left": np.pi / 2 + 0.02, "right": np.pi / 2 + 0.01}


def rotation_from_rpy(roll_rad: float, pitch_rad: float, yaw_rad: float) -> Float64Array:
    """Rotation matrix Rz(yaw) Ry(pitch) Rx(roll), the convention of robot description files."""
    cr, sr, cp, sp = np.cos(roll_rad), np.sin(roll_rad), np.cos(pitch_rad), np.sin(pitch_rad)
    cy, sy = np.cos(yaw_rad), np.sin(yaw_rad)
    return np.array(
        [
            [cy * cp, cy * sp * sr - sy * cr, cy * sp * cr + sy * sr],
            [sy * cp, sy * sp * sr + cy * cr, sy * sp * cr - cy * sr],
            [-sp, cp * sr, cp * cr],
        ]
    )


def base_frame(arm: str) -> Float64Array:
    """World frame of an arm's base, (4, 4)."""
    if arm not in ARMS:
        raise ValueError(f"arm: expected one of {', '.join(ARMS)}; got {arm!r}")
    frame = np.eye(4)
    frame[:3, :3] = rotation_from_rpy(0.0, 0.0, BASE_YAWS_RAD[arm])
    frame[:3, 3] = BASE_POSITIONS_M[arm]
    return frame


def arm_link_frames(arm: str, joints_rad: ArrayLike) -> Float64Array:
    """World frames of the base and of links 1 to 6.

    Args:
        arm: "left" or "right".
        joints_rad: (..., 6), finite.

    Returns:
        float64 (..., 7, 4, 4); index 0 is the base, index 6 is link 6.

    Raises:
        ValueError: on a wrong shape or a non-finite angle.
    """
    angles = np.asarray(joints_rad, dtype=np.float64)
    if angles.ndim < 1 or angles.shape[-1] != len(X5_JOINTS):
        raise ValueError(f"joints_rad: expected (..., {len(X5_JOINTS)}); got {angles.shape}")
    if not np.isfinite(angles).all():
        raise ValueError("joints_rad: expected finite angles; got NaN or infinity")
    frames = np.empty((*angles.shape[:-1], len(X5_JOINTS) + 1, 4, 4))
    frames[..., 0, :, :] = base_frame(arm)
    for index, joint in enumerate(X5_JOINTS):
        motion = _offset(joint) @ _axis_rotation(joint.axis, angles[..., index])
        frames[..., index + 1, :, :] = frames[..., index, :, :] @ motion
    return frames


def arm_forward_kinematics(arm: str, joints_rad: ArrayLike) -> tuple[Float64Array, Float64Array]:
    """Positions (..., 3) in metres and rotations (..., 3, 3) of link 6 in the world."""
    link = arm_link_frames(arm, joints_rad)[..., -1, :, :]
    return link[..., :3, 3], link[..., :3, :3]


def tool_centre(arm: str, joints_rad: ArrayLike) -> Float64Array:
    """Where the fingers hold, (..., 3) in metres: `TOOL_CENTRE_M` ahead of link 6."""
    positions, rotations = arm_forward_kinematics(arm, joints_rad)
    return positions + TOOL_CENTRE_M * rotations[..., :, 0]


def euler_xyz(rotations: ArrayLike) -> Float64Array:
    """Angles (roll, pitch, yaw) with rotation = Rz(yaw) Ry(pitch) Rx(roll); (..., 3, 3) to (..., 3), radians."""
    matrix = np.asarray(rotations, dtype=np.float64)
    pitch = np.arcsin(np.clip(-matrix[..., 2, 0], -1.0, 1.0))
    roll = np.arctan2(matrix[..., 2, 1], matrix[..., 2, 2])
    yaw = np.arctan2(matrix[..., 1, 0], matrix[..., 0, 0])
    return np.stack([roll, pitch, yaw], axis=-1)


def _offset(joint: Joint) -> Float64Array:
    """Frame of a joint at angle 0 in its parent link, (4, 4)."""
    offset = np.eye(4)
    offset[:3, :3] = rotation_from_rpy(*joint.rpy_rad)
    offset[:3, 3] = joint.origin_m
    return offset


def _axis_rotation(axis: tuple[float, float, float], angles: Float64Array) -> Float64Array:
    """Rotation by `angles` about a coordinate axis, as (..., 4, 4)."""
    first, second = {0: (1, 2), 1: (2, 0), 2: (0, 1)}[axis.index(1.0)]
    rotation = np.zeros((*angles.shape, 4, 4))
    rotation[...] = np.eye(4)
    cosine, sine = np.cos(angles), np.sin(angles)
    rotation[..., first, first], rotation[..., second, second] = cosine, cosine
    rotation[..., first, second], rotation[..., second, first] = -sine, sine
    return rotation
