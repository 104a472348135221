"""A scripted expert: inverse kinematics at keyframes, minimum-jerk in joint space between them, one fixed timing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.sim_server.tabletop.bottle import BOTTOM_X_M
from services.sim_server.tabletop.inverse_kinematics import UnreachableError, solve
from services.sim_server.tabletop.robot import JOINT_LIMITS_RAD, home
from services.sim_server.tabletop.scene import TabletopScene

Float64Array = NDArray[np.float64]

EPISODE_ACTIONS = 200
# Actions of each phase; the rest of the episode holds still.
REACH, DESCEND, CLOSE, LIFT, CARRY = 40, 22, 14, 18, 46
APPROACH_HEIGHT_M = 0.10
LIFT_HEIGHT_M = 0.10
# The pads hold a little above the bottle's axis, so that their tips clear the table.
GRASP_ABOVE_AXIS_M = 0.006
# Where the centre of the bottle's bottom is brought: RoboTwin's goal (0.25, -0.12, 0.95), moved in along x so that
# the whole bottle stays in view.
GOAL_ABS_X_M, GOAL_Y_M, GOAL_Z_M = 0.20, -0.12, 0.97
# First guesses of the right arm, near RoboTwin's own solutions; the left arm mirrors joints 1, 5 and 6.
_GRASP_START_RAD = np.array([0.85, 2.2, 1.6, -0.9, 0.06, -0.86])
_GOAL_START_RAD = np.array([0.45, 1.1, 0.3, 0.8, 0.5, 0.0])
_MIRROR = np.array([-1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
_UP = np.array([0.0, 0.0, 1.0])
_AWAY = np.array([0.0, 1.0, 0.0])


@dataclass(frozen=True)
class PlanNoise:
    """Errors of one plan, in the frame of the lying bottle: metres and radians; zero is the clean expert."""

    along_m: float = 0.0
    lateral_m: float = 0.0
    up_m: float = 0.0
    yaw_rad: float = 0.0
    goal_x_m: float = 0.0
    goal_z_m: float = 0.0

    @classmethod
    def sample(cls, scale: float, generator: np.random.Generator) -> PlanNoise:
        """Independent normal errors times `scale`; always draws six numbers, so streams stay aligned."""
        if not np.isfinite(scale) or scale < 0.0:
            raise ValueError(f"noise_scale: expected a finite number >= 0; got {scale!r}")
        drawn = generator.standard_normal(6) * scale
        along, lateral, up, yaw, goal_x, goal_z = (float(value) for value in drawn)
        return cls(
            along_m=0.014 * along,
            lateral_m=0.018 * lateral,
            up_m=0.006 * scale + 0.012 * up,
            yaw_rad=0.15 * yaw,
            goal_x_m=0.008 * goal_x,
            goal_z_m=0.008 * goal_z,
        )


def plan_expert(scene: TabletopScene, noise_scale: float, generator: np.random.Generator) -> NDArray[np.float32]:
    """A whole episode of targets, planned from the scene's settled bottle pose.

    Args:
        scene: at its reset state.
        noise_scale: 0 is the clean expert; about 1.6 makes half the episodes fail (air grasps, slips, knocks, too low).
        generator: draws the errors; six numbers whatever the scale.

    Returns:
        float32 (200, 14): the arm on the bottle's side moves, the other holds home. Executing it changes no joint
        target by more than 0.15 rad an action.

    Raises:
        UnreachableError: when no keyframe near the asked one is in reach.
    """
    noise = PlanNoise.sample(noise_scale, generator)
    grasp, above, lifted, goal = _keyframes(scene, noise)
    joints = [np.zeros(6)]
    for target, actions in ((above, REACH), (grasp, DESCEND), (grasp, CLOSE), (lifted, LIFT), (goal, CARRY)):
        joints.extend(_minimum_jerk(joints[-1], target, actions))
    joints.extend([goal] * (EPISODE_ACTIONS + 1 - len(joints)))
    gripper = np.ones(EPISODE_ACTIONS)
    closing = REACH + DESCEND
    gripper[closing : closing + CLOSE] = [1.0 - value for value in _progress(CLOSE)]
    gripper[closing + CLOSE :] = 0.0
    plan = np.repeat(home()[None], EPISODE_ACTIONS, axis=0)
    offset = 7 if scene.parameters.arm == "right" else 0
    plan[:, offset : offset + 6] = np.asarray(joints[1:])
    plan[:, offset + 6] = gripper
    return plan


def _keyframes(scene: TabletopScene, noise: PlanNoise) -> tuple[Float64Array, Float64Array, Float64Array, Float64Array]:
    """Joint angles (6,) at the grasp, above it, lifted, and at the goal."""
    arm, side = scene.parameters.arm, scene.parameters.side
    mirror = np.ones(6) if arm == "right" else _MIRROR
    centre, rotation = scene.bottle_pose()
    head = np.array([rotation[0, 0], rotation[1, 0], 0.0])
    head = head / np.linalg.norm(head)
    across = np.cross(_UP, head)
    position = centre + noise.along_m * head + noise.lateral_m * across + (GRASP_ABOVE_AXIS_M + noise.up_m) * _UP
    turned = np.cos(noise.yaw_rad) * head + np.sin(noise.yaw_rad) * across
    # The hand points down, its z axis along the bottle's head: turning the wrist forward then brings the head up.
    down = np.column_stack([-_UP, np.cross(turned, -_UP), turned])
    above = _solve(arm, position + APPROACH_HEIGHT_M * _UP, down, mirror * _GRASP_START_RAD)
    grasp = _solve(arm, position, down, above)
    lifted = _solve(arm, position + LIFT_HEIGHT_M * _UP, down, grasp)
    forward = np.column_stack([_AWAY, np.cross(_UP, _AWAY), _UP])
    goal_position = np.array([side * (GOAL_ABS_X_M + noise.goal_x_m), GOAL_Y_M, GOAL_Z_M - BOTTOM_X_M + noise.goal_z_m])
    goal = _solve(arm, goal_position, forward, mirror * _GOAL_START_RAD)
    return grasp, above, lifted, goal


def _solve(arm: str, position_m: Float64Array, rotation: Float64Array, start_rad: Float64Array) -> Float64Array:
    """`inverse_kinematics.solve`, drawn toward the arm's comfortable workspace where noise asks for the impossible."""
    for pull in (0.0, 0.1, 0.2, 0.4):
        comfortable = np.array([(0.1 if arm == "right" else -0.1), -0.13, max(position_m[2], 0.76)])
        try:
            return solve(arm, (1.0 - pull) * position_m + pull * comfortable, rotation, start_rad, JOINT_LIMITS_RAD)
        except UnreachableError as error:
            failure = error
    raise failure


def _minimum_jerk(start: Float64Array, end: Float64Array, actions: int) -> list[Float64Array]:
    return [start + value * (end - start) for value in _progress(actions)]


def _progress(actions: int) -> list[float]:
    """Minimum-jerk progress after each of n actions (Flash and Hogan, 1985): 10 s^3 - 15 s^4 + 6 s^5, ending at 1."""
    steps = np.arange(1, actions + 1) / actions
    return [float(value) for value in steps**3 * (10.0 - 15.0 * steps + 6.0 * steps**2)]
