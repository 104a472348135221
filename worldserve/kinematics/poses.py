"""From 14 joint targets to the 14 numbers a BWM-type world model is conditioned on."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from worldserve.kinematics.x5 import arm_forward_kinematics, euler_xyz


def end_effector_poses(targets: ArrayLike) -> NDArray[np.float64]:
    """Absolute poses of both end effectors for joint targets in the contract's order.

    Args:
        targets: (..., 14): left j1-6 [rad], left gripper [0..1], right j1-6, right gripper.

    Returns:
        float64 (..., 14): left x y z [m], Euler x y z [rad], gripper [0..1]; right likewise. The order is that of
        the published BWM's statistics of `state_pose`.
    """
    values = np.asarray(targets, dtype=np.float64)
    if values.ndim < 1 or values.shape[-1] != 14:
        raise ValueError(f"targets: expected (..., 14); got {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("targets: expected finite joint targets and grippers; got NaN or infinity")
    poses = np.empty_like(values)
    for arm, start in (("left", 0), ("right", 7)):
        positions, rotations = arm_forward_kinematics(arm, values[..., start : start + 6])
        poses[..., start : start + 3] = positions
        poses[..., start + 3 : start + 6] = euler_xyz(rotations)
        poses[..., start + 6] = values[..., start + 6]
    return poses
