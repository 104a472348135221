"""Perturbed copies of an action sequence that may fail where it succeeded: the same start, other actions.

A perturbation touches the arm that moves, from the first action until the lift, and fades out after it: what differs
between the two members of a pair is the grasp and its consequence, not the rest of the motion. It has a size, so that
the smallest one that fails can be kept: near misses are the pairs that a world model has to tell apart.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from worldserve.contract import ActionLayout, execute
from worldserve.kinematics import ARMS, arm_forward_kinematics, tool_centre

Kind = Literal["offset", "modes", "gripper"]
KINDS: tuple[Kind, ...] = ("offset", "modes", "gripper")
UNITS: dict[Kind, str] = {"offset": "mm", "modes": "mm", "gripper": "actions"}
MODES = 4
HOLD_ACTIONS, FADE_ACTIONS = 5, 20
_PROBE_RAD = 1e-4


@dataclass(frozen=True)
class Grasp:
    """Which arm grasps, and when: its gripper has begun to close before action `begin` and is closed at `end`."""

    arm: str
    begin: int
    end: int

    @property
    def joints(self) -> slice:
        """The arm's six joints in an action."""
        start = 7 * ARMS.index(self.arm)
        return slice(start, start + 6)

    @property
    def gripper(self) -> int:
        """The arm's gripper in an action."""
        return 7 * ARMS.index(self.arm) + 6


def find_grasp(actions: NDArray[np.float32]) -> Grasp | None:
    """The grasp of an episode, (n, 14): by the arm whose joints travel farther. None where its gripper never closes.

    The gripper closes between the first targets below 80% and below 20% of its range over the episode.
    """
    travel = [float(np.abs(np.diff(actions[:, 7 * arm : 7 * arm + 6], axis=0)).sum()) for arm in range(2)]
    arm = ARMS[int(np.argmax(travel))]
    gripper = actions[:, 7 * ARMS.index(arm) + 6]
    low, high = float(gripper.min()), float(gripper.max())
    begin, end = (np.flatnonzero(gripper < low + share * (high - low)) for share in (0.8, 0.2))
    if high - low < 0.5 or not len(begin) or not len(end) or begin[0] == 0:
        return None
    return Grasp(arm, int(begin[0]), int(end[0]))


def envelope(grasp: Grasp, length: int) -> NDArray[np.float64]:
    """(length,): from 0 smoothly to 1 at the grasp, 1 until it is closed and a little longer, then back to 0."""
    actions = np.arange(length)
    rise = np.clip((actions + 1) / max(1, grasp.begin), 0, 1)
    fall = np.clip((actions - grasp.end - HOLD_ACTIONS) / FADE_ACTIONS, 0, 1)
    return 0.5 * (1 - np.cos(np.pi * rise)) * 0.5 * (1 + np.cos(np.pi * fall))


@dataclass(frozen=True)
class Perturbation:
    """One direction in which an episode's actions are perturbed; `apply` gives it a size.

    Attributes:
        kind: "offset": the tool centre displaced in one direction at the grasp, its orientation kept so far as the arm
            can; "modes": every joint moved along a few low cosine modes; "gripper": it closes earlier or later.
        grasp: what it is about.
        change: float64 (n, 6), joint changes [rad] that displace the tool centre by 1 mm at most (for "offset": at the
            grasp); None for "gripper".
        later: whether the gripper closes later.
    """

    kind: Kind
    grasp: Grasp
    change: NDArray[np.float64] | None
    later: bool

    def apply(self, actions: NDArray[np.float32], size: float) -> NDArray[np.float32]:
        """`actions` (n, 14) perturbed by `size`, in millimetres or actions (`UNITS`); not clipped yet."""
        perturbed = actions.copy()
        if self.change is not None:
            perturbed[:, self.grasp.joints] += (size * self.change).astype(np.float32)
            return perturbed
        shift = round(size) if self.later else -round(size)
        moved = np.clip(np.arange(len(actions)) - shift, 0, len(actions) - 1)
        perturbed[:, self.grasp.gripper] = actions[moved, self.grasp.gripper]
        return perturbed


def draw_perturbation(
    actions: NDArray[np.float32], grasp: Grasp, kinds: tuple[Kind, ...], generator: np.random.Generator
) -> Perturbation:
    """Draws kind and direction for an episode's actions, float32 (n, 14)."""
    kind = kinds[int(generator.integers(len(kinds)))]
    later = bool(generator.integers(2))
    angle, rise = float(generator.uniform(0, 2 * np.pi)), float(generator.uniform(0, 0.5))
    amplitudes = generator.normal(size=(MODES, 6)) / np.arange(1, MODES + 1)[:, None]
    joints = actions[:, grasp.joints].astype(np.float64)
    shape = envelope(grasp, len(actions))[:, None]
    change = None
    if kind == "offset":
        direction = np.array([np.cos(angle), np.sin(angle), rise])
        change = shape * _joint_step(grasp.arm, joints[grasp.begin], direction / np.linalg.norm(direction)) * 1e-3
    elif kind == "modes":
        time = np.clip(np.arange(len(actions)) / grasp.end, 0, 1)
        modes = np.cos(np.pi * np.arange(MODES) * time[:, None])
        change = shape * (modes @ amplitudes)
        moved = tool_centre(grasp.arm, joints + _PROBE_RAD * change) - tool_centre(grasp.arm, joints)
        change *= 1e-3 * _PROBE_RAD / float(np.linalg.norm(moved, axis=1).max())
    return Perturbation(kind, grasp, change, later)


def _joint_step(arm: str, joints: NDArray[np.float64], direction: NDArray[np.float64]) -> NDArray[np.float64]:
    """Joint changes [rad] a metre of the tool centre along `direction`, turning the gripper as little as it can.

    Damped least squares on the numerical Jacobian (Wampler 1986): near a singular wrist the joints stay calm.
    """
    probes = joints + _PROBE_RAD * np.eye(6)
    position, (_, rotation) = tool_centre(arm, joints), arm_forward_kinematics(arm, joints)
    _, rotations = arm_forward_kinematics(arm, probes)
    linear = (tool_centre(arm, probes) - position).T / _PROBE_RAD
    turned = rotations @ rotation.T
    axes = np.stack(
        [turned[:, 2, 1] - turned[:, 1, 2], turned[:, 0, 2] - turned[:, 2, 0], turned[:, 1, 0] - turned[:, 0, 1]]
    )
    angular = 0.5 * axes / _PROBE_RAD
    rows = np.vstack([linear, 0.1 * angular, 0.01 * np.eye(6)])
    step = np.linalg.lstsq(rows, np.concatenate([direction, np.zeros(9)]), rcond=None)[0]
    return np.asarray(step / np.linalg.norm(linear @ step), dtype=np.float64)


def perturbation_generator(seed: int, episode_id: str) -> np.random.Generator:
    """The generator of an episode's perturbation: a function of (seed, episode id) alone."""
    digest = int.from_bytes(hashlib.sha256(episode_id.encode()).digest()[:8], "big")
    return np.random.default_rng([seed, digest])


def executed(requested: NDArray[np.float32], start: NDArray[np.float32], layout: ActionLayout) -> NDArray[np.float32]:
    """The actions as simulator and world model run them, after the state `start` (14,); running them clips nothing."""
    return execute(requested, start, layout).actions
