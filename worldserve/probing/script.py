"""What the probes do: a few episodes of chosen actions, shared between all probes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worldserve.contract import Interface, execute

Actions = NDArray[np.float32]

SLOT = 25
"""Actions in which one number of the action goes up, down and back."""
STRIDE = 5
"""Every how many-th frame is asked for, where chunks end with one of them; every frame otherwise."""
SWEEP_RAD = 0.6
UP_AT, DOWN_AT = 10, 20
LEVELS = (0.25, 0.5, 0.75)
"""Where along its path the excursion halts, for one slot each."""
SETTLED_AT = 15
HOLD_UNTIL, HOME_AT, ONSET_UNTIL = 100, 150, 200
"""Actions of the excursion: stands at the last level, is back home, has set off again."""
ONSET_WAIT, ONSET_RAMP, ONSET_SHARE = 10, 20, 0.5
WAYS = ((0.0, 0.25), (0.5, 0.75))
"""Parts of the successful episode of which every frame is asked for: the way out, and the way up."""
GRASP = (0.4, 0.6)
"""The part in which a hand that closed at the object begins to take it along."""


@dataclass(frozen=True)
class Script:
    """Actions by episode, made for one interface and one reset state.

    Args:
        interface: the target's.
        home: float32 (dimensions,), the proprioception of a Reset.
        path: float32 (dimensions,), where the excursion leads.
    """

    interface: Interface
    home: NDArray[np.float32]
    path: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.interface.termination.limit_actions < SLOT:
            raise ValueError(
                f"target: expected episodes of at least {SLOT} actions, which the probes need; got "
                f"{self.interface.termination.limit_actions}"
            )

    @property
    def limit(self) -> int:
        """Actions of an episode."""
        return self.interface.termination.limit_actions

    def frames_of(self, part: tuple[float, float]) -> range:
        """Numbers of the frames in a part of the episode."""
        return range(int(part[0] * self.limit) + 1, int(part[1] * self.limit) + 1)

    def hold(self) -> Actions:
        """The whole episode at home, float32 (limit, dimensions)."""
        return np.repeat(self.home[None], self.limit, axis=0)

    def gripped_otherwise(self, actions: Actions) -> Actions | None:
        """The same with the grippers mirrored in their range, open for closed; None where there is no gripper."""
        grippers = [n for n, d in enumerate(self.interface.action.dimensions) if d.unit == "fraction"]
        mirrored = actions.copy()
        for number in grippers:
            dimension = self.interface.action.dimensions[number]
            mirrored[:, number] = np.float32(dimension.low + dimension.high) - mirrored[:, number]
        return self._executed(mirrored) if grippers else None

    def sweeps(self) -> list[tuple[list[int], Actions]]:
        """Episodes in which one number after another is moved: which ones, and float32 (limit, dimensions)."""
        each = self.limit // SLOT
        count = self.interface.action_dimensions
        episodes = []
        for first in range(0, count, each):
            moved = list(range(first, min(first + each, count)))
            wanted = self.hold()
            for slot, number in enumerate(moved):
                up, down = self._ends(number)
                wanted[slot * SLOT : slot * SLOT + UP_AT, number] = up
                wanted[slot * SLOT + UP_AT : slot * SLOT + DOWN_AT, number] = down
            episodes.append((moved, self._executed(wanted)))
        return episodes

    def _ends(self, number: int) -> tuple[float, float]:
        dimension, home = self.interface.action.dimensions[number], float(self.home[number])
        if dimension.unit == "fraction":
            far = dimension.low if home - dimension.low > dimension.high - home else dimension.high
            return far, home
        return min(home + SWEEP_RAD, dimension.high), max(home - SWEEP_RAD, dimension.low)

    def excursion(self) -> Actions:
        """By halts along the path, back home at once, and off again: float32 (limit, dimensions)."""
        wanted: list[NDArray[np.float32]] = []
        before = 0.0
        for level in LEVELS:
            wanted += [self._at(before + (level - before) * min(1.0, k / 10)) for k in range(1, SLOT + 1)]
            before = level
        wanted += [self._at(before)] * (HOLD_UNTIL - len(wanted))
        wanted += [self._at(0.0)] * (HOME_AT - len(wanted))
        wanted += [self._at(0.0)] * ONSET_WAIT
        wanted += [self._at(ONSET_SHARE * k / ONSET_RAMP) for k in range(1, ONSET_RAMP + 1)]
        wanted += [self._at(ONSET_SHARE)] * max(0, self.limit - len(wanted))
        return self._executed(np.array(wanted[: self.limit], np.float32))

    def _at(self, share: float) -> NDArray[np.float32]:
        return (self.home + np.float32(share) * (self.path - self.home)).astype(np.float32)

    def _executed(self, wanted: Actions) -> Actions:
        """What the contract lets through, so that nothing that is sent is clipped."""
        return execute(wanted, self.home, self.interface.action).actions


def default_path(interface: Interface, home: NDArray[np.float32]) -> NDArray[np.float32]:
    """Where the excursion leads without a reference: every joint of the last arm 0.8 rad up, within its limits."""
    path = home.copy()
    arm = interface.action.dimensions[-1].arm
    for number, dimension in enumerate(interface.action.dimensions):
        if dimension.unit == "rad" and dimension.arm == arm:
            path[number] = min(float(home[number]) + 0.8, dimension.high)
    return path
