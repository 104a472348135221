"""The dual-arm robot: two X5-type arms of primitive shapes with parallel grippers, from the published joint table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import sapien
from numpy.typing import NDArray
from sapien import physx

from services.sim_server.tabletop import rendering
from worldserve.kinematics import ARMS, X5_JOINTS, base_frame, rotation_from_rpy

# Target limits of one arm's joints: the real X5's, widened where RoboTwin's own data goes beyond them.
JOINT_LIMITS_RAD = np.array([[-3.14, 3.14], [-0.2, 3.14], [-0.2, 3.14], [-1.75, 1.75], [-1.75, 1.75], [-3.14, 3.14]])
# Gripper fraction 0..1 to the drive target of each finger, as RoboTwin maps it.
FINGER_CLOSED_M, FINGER_OPEN_M = -0.01, 0.045
_FINGER_ORIGIN_X_M, _FINGER_ORIGIN_Y_M, _FINGER_STROKE_M = 0.08457, 0.0245, 0.04765
_PAD_LENGTH_M, _PAD_THICKNESS_M, _PAD_WIDTH_M = 0.060, 0.012, 0.024
# Masses of links 1 to 6, about those of a 3 kg arm.
_LINK_MASSES_KG = (0.6, 0.8, 0.6, 0.3, 0.2, 0.4)
_FINGER_MASS_KG = 0.05
_RADIUS_M = 0.03
_ARMATURE_KG_M2 = 0.1

# SAPIEN turns and slides joints about their frame's x axis: rotations that bring x onto the axis named.
_X_ONTO = {"x": np.eye(3), "y": rotation_from_rpy(0, 0, np.pi / 2), "z": rotation_from_rpy(0, -np.pi / 2, 0)}


@dataclass(frozen=True)
class DriveSettings:
    """Gains of the position drives. RoboTwin's 1000/200 lag by 0.2 s; see the README."""

    stiffness: float = 1000.0
    damping: float = 50.0
    force_limit: float = 100.0
    finger_stiffness: float = 700.0
    finger_damping: float = 60.0
    finger_force_limit: float = 30.0


def joint_limits() -> NDArray[np.float32]:
    """Limits of the 14 action dimensions, float32 (14, 2): radians; grippers 0 closed, 1 open."""
    arm = np.vstack([JOINT_LIMITS_RAD, [[0.0, 1.0]]])
    return np.vstack([arm, arm]).astype(np.float32)


def home() -> NDArray[np.float32]:
    """The initial targets, float32 (14,): all joints 0, grippers open."""
    target = np.zeros(14, np.float32)
    target[[6, 13]] = 1.0
    return target


class Robot:
    """Both arms in a scene; targets go in as the 14 numbers of an action, joints are found by name."""

    def __init__(self, scene: sapien.Scene, drives: DriveSettings, render: bool) -> None:
        self.articulations = {
            arm: _ArmBuilder(scene, arm, index + 1, drives, render).build() for index, arm in enumerate(ARMS)
        }
        self._joints: dict[str, physx.PhysxArticulationJoint] = {}
        self._order: dict[str, list[int]] = {}
        for arm, articulation in self.articulations.items():
            names = [joint.name for joint in articulation.active_joints]
            self._joints.update(zip(names, articulation.active_joints, strict=True))
            self._order[arm] = [names.index(f"{arm}_joint_{number}") for number in range(1, 7)]
        initial = home()
        for articulation in self.articulations.values():
            articulation.qpos = np.array(
                [FINGER_OPEN_M if "finger" in joint.name else 0.0 for joint in articulation.active_joints], np.float32
            )
        self.set_targets(initial)

    def set_targets(self, action: NDArray[np.float32]) -> None:
        """Sets all drive targets from one action, float32 (14,)."""
        values = [float(value) for value in action]
        for index, arm in enumerate(ARMS):
            offset = 7 * index
            for number in range(6):
                self._joints[f"{arm}_joint_{number + 1}"].set_drive_target(values[offset + number])
            finger = FINGER_CLOSED_M + (FINGER_OPEN_M - FINGER_CLOSED_M) * values[offset + 6]
            self._joints[f"{arm}_finger_left"].set_drive_target(finger)
            self._joints[f"{arm}_finger_right"].set_drive_target(finger)

    def joint_positions(self, arm: str) -> NDArray[np.float32]:
        """Measured positions of joints 1 to 6, float32 (6,), radians."""
        positions: NDArray[np.float32] = np.asarray(self.articulations[arm].qpos, np.float32)[self._order[arm]]
        return positions

    def state(self) -> NDArray[np.float32]:
        """Measured positions and velocities of every joint of both arms, float32 (32,): for comparing states."""
        parts = [part for arm in ARMS for part in (self.articulations[arm].qpos, self.articulations[arm].qvel)]
        return np.concatenate([np.asarray(part, np.float32) for part in parts])


class _ArmBuilder:
    """Builds one arm. Shapes of the same arm never collide with each other; the two arms and all else do."""

    def __init__(self, scene: sapien.Scene, arm: str, group: int, drives: DriveSettings, render: bool) -> None:
        self.builder = scene.create_articulation_builder()
        self.arm, self.group, self.drives, self.render = arm, group, drives, render
        self.body_material = physx.PhysxMaterial(0.6, 0.6, 0.0)
        self.pad_material = physx.PhysxMaterial(1.2, 1.2, 0.0)

    def build(self) -> physx.PhysxArticulation:
        self.builder.set_initial_pose(sapien.Pose(base_frame(self.arm)))
        link = self.builder.create_link_builder()
        link.set_name(f"{self.arm}_base")
        self._box(link, (0.0, 0.0, 0.025), (0.06, 0.06, 0.033), _COLOURS["base"])
        self._mass(link, 1.0)
        for index in range(len(X5_JOINTS)):
            link = self._revolute(link, index)
            self._link_shapes(link, index)
        for name, sign in (("left", 1.0), ("right", -1.0)):
            self._finger(link, name, sign)
        articulation = self.builder.build(fix_root_link=True)
        self._set_drives(articulation)
        return articulation

    def _revolute(self, parent: object, index: int) -> object:
        joint = X5_JOINTS[index]
        link = self.builder.create_link_builder(parent)
        link.set_name(f"{self.arm}_link_{index + 1}")
        link.set_joint_name(f"{self.arm}_joint_{index + 1}")
        alignment = _X_ONTO["xyz"[joint.axis.index(1.0)]]
        limits = JOINT_LIMITS_RAD[index] + [-0.05, 0.05]
        link.set_joint_properties(
            "revolute",
            [limits.tolist()],
            _pose(joint.origin_m, rotation_from_rpy(*joint.rpy_rad) @ alignment),
            _pose((0.0, 0.0, 0.0), alignment),
        )
        self._mass(link, _LINK_MASSES_KG[index])
        return link

    def _link_shapes(self, link: object, index: int) -> None:
        """A capsule from this joint to the next one; the hand (link 6) is a box as wide as the open fingers."""
        if index == 5:
            self._box(link, (0.012, 0.0, 0.0), (0.03, 0.028, 0.028), _COLOURS["link"])
            self._box(link, (0.06, 0.0, 0.0), (0.018, 0.062, 0.022), _COLOURS["hand"])
            return
        end = np.asarray(X5_JOINTS[index + 1].origin_m)
        self._capsule(link, end, _RADIUS_M if index < 3 else 0.85 * _RADIUS_M, _COLOURS["link"])

    def _finger(self, hand: object, name: str, sign: float) -> None:
        link = self.builder.create_link_builder(hand)
        link.set_name(f"{self.arm}_finger_{name}")
        link.set_joint_name(f"{self.arm}_finger_{name}")
        # x axis onto +y (left finger) or -y (right finger), so that both open with growing position.
        alignment = rotation_from_rpy(0.0, 0.0, sign * np.pi / 2)
        link.set_joint_properties(
            "prismatic",
            [[0.0, _FINGER_STROKE_M]],
            _pose((_FINGER_ORIGIN_X_M, sign * _FINGER_ORIGIN_Y_M, 0.0), alignment),
            _pose((0.0, 0.0, 0.0), alignment),
        )
        self._mass(link, _FINGER_MASS_KG)
        # The inner face meets the other finger's in the middle plane of the hand at position 0.
        centre = (0.5 * _PAD_LENGTH_M, sign * (0.5 * _PAD_THICKNESS_M - _FINGER_ORIGIN_Y_M), 0.0)
        half_size = (0.5 * _PAD_LENGTH_M, 0.5 * _PAD_THICKNESS_M, 0.5 * _PAD_WIDTH_M)
        self._box(link, centre, half_size, _COLOURS["finger"], self.pad_material)

    def _mass(self, link: object, mass_kg: float) -> None:
        # Drives carry the arm (armature, gravity off), so a plain sphere-like inertia will do.
        inertia = 0.4 * mass_kg * 0.06**2
        link.set_mass_and_inertia(mass_kg, sapien.Pose(), [inertia] * 3)  # type: ignore[attr-defined]

    def _box(
        self,
        link: object,
        centre_m: tuple[float, float, float],
        half_size_m: tuple[float, float, float],
        colour: tuple[float, float, float],
        material: physx.PhysxMaterial | None = None,
    ) -> None:
        pose = sapien.Pose(list(centre_m))
        link.add_box_collision(pose, half_size_m, material or self.body_material)  # type: ignore[attr-defined]
        if self.render:
            link.add_box_visual(pose, half_size_m, rendering.material(*colour))  # type: ignore[attr-defined]

    def _capsule(
        self, link: object, end_m: NDArray[np.float64], radius_m: float, colour: tuple[float, float, float]
    ) -> None:
        length = float(np.linalg.norm(end_m))
        direction = end_m / length
        side = np.cross((0.0, 1.0, 0.0), direction)
        side = side / np.linalg.norm(side)
        pose = _pose(tuple(0.5 * end_m), np.column_stack([direction, np.cross(side, direction), side]))
        link.add_capsule_collision(pose, radius_m, 0.5 * length, self.body_material)  # type: ignore[attr-defined]
        if self.render:
            link.add_capsule_visual(pose, radius_m, 0.5 * length, rendering.material(*colour))  # type: ignore[attr-defined]

    def _set_drives(self, articulation: physx.PhysxArticulation) -> None:
        drives = self.drives
        for link in articulation.links:
            link.disable_gravity = True
            for shape in link.collision_shapes:
                # Shapes with a common bit in the third group and the same id in the fourth ignore each other.
                shape.set_collision_groups([1, 1, 1, self.group])
        for joint in articulation.active_joints:
            if "finger" in joint.name:
                joint.set_drive_properties(drives.finger_stiffness, drives.finger_damping, drives.finger_force_limit)
            else:
                joint.set_drive_properties(drives.stiffness, drives.damping, drives.force_limit)
                joint.set_armature(np.array([_ARMATURE_KG_M2], np.float32))


_COLOURS = {
    "base": (0.12, 0.13, 0.16),
    "link": (0.16, 0.24, 0.42),
    "hand": (0.08, 0.12, 0.24),
    "finger": (0.85, 0.60, 0.08),
}


def _pose(position: tuple[float, ...], rotation: NDArray[np.float64]) -> sapien.Pose:
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = rotation, position
    return sapien.Pose(matrix)
