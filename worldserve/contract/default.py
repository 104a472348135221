"""The contract of the embedded default: RoboTwin 2.0's adjust_bottle at 96x128."""

from __future__ import annotations

from collections.abc import Mapping

from worldserve.contract.schema import ActionDimension, ActionLayout, Contract, Interface, Provenance
from worldserve.version import __version__

# Real X5 limits, widened where RoboTwin's own data goes beyond them (j6 past 2.1, j2 slightly below 0):
# REFERENCE facts on RoboTwin 2.0. Radians.
_JOINT_LIMITS = {
    1: (-3.14, 3.14),
    2: (-0.2, 3.14),
    3: (-0.2, 3.14),
    4: (-1.75, 1.75),
    5: (-1.75, 1.75),
    6: (-3.14, 3.14),
}
# Largest change of a joint target in one 60 ms action: 2.5 rad/s. Without it garbage actions throw the bottle metres.
_JOINT_MAX_CHANGE_RAD = 0.15


def adjust_bottle_interface() -> Interface:
    """The interface of the default task: 14 absolute joint targets, 4 chunks of 50 actions, one head camera."""
    dimensions: list[ActionDimension] = []
    for arm in ("left", "right"):
        for joint, (low, high) in _JOINT_LIMITS.items():
            dimensions.append(ActionDimension(f"{arm}_joint_{joint}", "rad", low, high, _JOINT_MAX_CHANGE_RAD, arm))
        dimensions.append(ActionDimension(f"{arm}_gripper", "fraction", 0.0, 1.0, 1.0, arm))
    return Interface(task="adjust_bottle", action=ActionLayout(tuple(dimensions)))


def adjust_bottle(kind: str, backend: str, facts: Mapping[str, str]) -> Contract:
    """The default contract of a server of `kind` ("simulator", "world_model", "reward_model") and its facts."""
    return Contract(adjust_bottle_interface(), Provenance(kind, backend, __version__, facts))
