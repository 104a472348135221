"""Faults of what an action means: the numbers arrive, and stand for something else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from worldserve.contract import Interface
from worldserve.faults.layer import ActionLayer, Calls, dimensions_of
from worldserve.messages import StepItem

NARROW_RANGE_RAD = 0.5
PLAN_REACH_RAD = 1.2
BATCH_SHARE = 0.1


class ArmsSwapped(ActionLayer):
    """Each arm gets the numbers of the other one."""

    def __init__(self, inner: Calls, interface: Interface) -> None:
        super().__init__(inner, interface)
        left, right = (
            [n for n, dimension in enumerate(interface.action.dimensions) if dimension.arm == arm]
            for arm in ("left", "right")
        )
        if not left or len(left) != len(right):
            raise ValueError(
                f"fault arms_swapped: expected two arms of as many dimensions; got {len(left)} left and {len(right)} "
                "right. Leave the fault out for this interface."
            )
        self._order = np.arange(interface.action_dimensions)
        self._order[left], self._order[right] = right, left

    def distort(self, item: StepItem, items: Sequence[StepItem]) -> NDArray[np.float32]:
        """The arms' blocks exchanged."""
        return item.actions[:, self._order]


class JointOrder(ActionLayer):
    """Each arm's joints arrive in the opposite order."""

    def __init__(self, inner: Calls, interface: Interface) -> None:
        super().__init__(inner, interface)
        self._order = np.arange(interface.action_dimensions)
        for arm in ("left", "right"):
            joints = dimensions_of(interface, "rad", arm)
            self._order[joints] = joints[::-1]

    def distort(self, item: StepItem, items: Sequence[StepItem]) -> NDArray[np.float32]:
        """The joints reversed within their arm."""
        return item.actions[:, self._order]


class GripperSense(ActionLayer):
    """Open arrives as closed."""

    def distort(self, item: StepItem, items: Sequence[StepItem]) -> NDArray[np.float32]:
        """Grippers mirrored in their range."""
        actions = item.actions.copy()
        for number in dimensions_of(self.interface, "fraction"):
            dimension = self.interface.action.dimensions[number]
            actions[:, number] = np.float32(dimension.low + dimension.high) - actions[:, number]
        return actions


class UnitsDegrees(ActionLayer):
    """Radians are taken for degrees."""

    def distort(self, item: StepItem, items: Sequence[StepItem]) -> NDArray[np.float32]:
        """Joints times pi / 180."""
        actions = item.actions.copy()
        joints = dimensions_of(self.interface, "rad")
        actions[:, joints] = np.deg2rad(actions[:, joints])
        return actions


class ActionSpace(ActionLayer):
    """End-effector poses arrive where joint targets are meant."""

    def __init__(self, inner: Calls, interface: Interface) -> None:
        super().__init__(inner, interface)
        if interface.action_dimensions != 14:
            raise ValueError(
                "fault action_space: expected the 14 numbers of two X5 arms, whose poses are known; got "
                f"{interface.action_dimensions} dimensions. Leave the fault out for this interface."
            )

    def distort(self, item: StepItem, items: Sequence[StepItem]) -> NDArray[np.float32]:
        """Positions in metres and Euler angles of both hands, in the place of joints."""
        from worldserve.kinematics import end_effector_poses

        return end_effector_poses(item.actions).astype(np.float32)


class NormalisationRange(ActionLayer):
    """Targets are cut to the narrow range of somebody's training data."""

    def distort(self, item: StepItem, items: Sequence[StepItem]) -> NDArray[np.float32]:
        """Joints within +-0.5 rad of the reset state."""
        actions, state = item.actions.copy(), self.reset_state(item.episode_id)
        joints = dimensions_of(self.interface, "rad")
        centre = state[joints]
        actions[:, joints] = np.clip(actions[:, joints], centre - NARROW_RANGE_RAD, centre + NARROW_RANGE_RAD)
        return actions


class DeltaActions(ActionLayer):
    """Absolute targets are taken for changes of the present one."""

    def distort(self, item: StepItem, items: Sequence[StepItem]) -> NDArray[np.float32]:
        """Joints added up, within their limits; the sum begins at the target that the caller believes in."""
        actions = item.actions.copy()
        joints = dimensions_of(self.interface, "rad")
        low, high = (
            np.array([getattr(self.interface.action.dimensions[n], side) for n in joints], np.float32)
            for side in ("low", "high")
        )
        present = self.target_before(item)[joints]
        for row in actions:
            present = np.clip(present + row[joints], low, high)
            row[joints] = present
        return actions


class ActionOffset(ActionLayer):
    """Every action arrives one action late."""

    def distort(self, item: StepItem, items: Sequence[StepItem]) -> NDArray[np.float32]:
        """The chunk shifted by one; the first action is the last one of the chunk before."""
        return np.concatenate([self.given_before(item)[None], item.actions[:-1]])


class PlanHolds(ActionLayer):
    """A chunk that reaches far fails to be planned, and the arm silently stays."""

    def distort(self, item: StepItem, items: Sequence[StepItem]) -> NDArray[np.float32]:
        """The present target held, where a joint would go further than 1.2 rad from it."""
        joints = dimensions_of(self.interface, "rad")
        present = self.target_before(item)
        reach = np.abs(item.actions[:, joints] - present[joints]).max(initial=0.0)
        return np.repeat(present[None], len(item.actions), axis=0) if reach > PLAN_REACH_RAD else item.actions


class BatchChanges(ActionLayer):
    """An episode's actions depend on which others share its call."""

    def distort(self, item: StepItem, items: Sequence[StepItem]) -> NDArray[np.float32]:
        """A tenth of the way towards the batch's mean, as a normalisation over the batch would do."""
        alike = [other.actions for other in items if other.actions.shape == item.actions.shape]
        mean = np.mean(alike, axis=0, dtype=np.float32)
        return (
            np.float32(1 - BATCH_SHARE) * item.actions + np.float32(BATCH_SHARE) * mean
            if len(alike) > 1
            else (item.actions)
        )
