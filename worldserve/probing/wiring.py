"""Probes of what an action does: which arm, which joint, which way, how far, when, and whether at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from worldserve.probing.finding import Finding, found, not_applicable
from worldserve.probing.motion import grey_map, size
from worldserve.probing.reference import Maps, Motion
from worldserve.probing.run import Run
from worldserve.probing.script import DOWN_AT, HOLD_UNTIL, HOME_AT, LEVELS, SETTLED_AT, SLOT, UP_AT

MARGIN = 0.15
"""By how much another wiring must explain the motion better."""
ALIKE = 0.35
"""Mean likeness to the reference below which the motion is another one."""
EXPLAINED = 0.6
"""Mean likeness at which another order of the joints explains the motion."""
FAINT = 0.25
"""Share of the reference's motion below which there is too little to read."""
RESTLESS = 0.45
"""Share of a joint's sweep that sending the reset state as an action may move (a world model redraws the picture)."""
MOVES_ON = 0.35
"""Share of a whole level's change that a picture may change by while the target stands."""
MODEL_MOVES_ON = 1.2
"""The same in a world model, which redraws the picture: bwm-mini's clean run showed 0.85."""
CLEARER = 0.85
"""Another lag must leave less than this share of the error at no lag."""
STALE_SHARE = 0.5
NO_FRAMES = "the target's episodes are too short, or ended too early, for this measurement"
LAGS = (-3, -2, -1, 0, 1, 2, 3)


@dataclass(frozen=True)
class Wiring:
    """A run's motion beside the reference's."""

    run: Run
    motion: Motion
    reference: Motion

    @cached_property
    def table(self) -> NDArray[np.float64]:
        """(dimensions, dimensions): likeness of what number i moved to what number j moves in the reference."""
        seen, known = (
            np.asarray(m.sweeps, np.float64).reshape(len(m.sweeps), -1) for m in (self.motion, self.reference)
        )
        sizes = np.linalg.norm(seen, axis=1)[:, None] * np.linalg.norm(known, axis=1)
        table: NDArray[np.float64] = np.divide(seen @ known.T, sizes, out=np.zeros(sizes.shape), where=sizes > 0)
        return table

    @cached_property
    def strength(self) -> NDArray[np.float64]:
        """(dimensions,): size of each number's motion as a share of the reference's."""
        pairs = zip(self.motion.sweeps, self.reference.sweeps, strict=True)
        return np.array([size(seen) / max(size(known), 1e-9) for seen, known in pairs])

    def numbers_of(self, unit: str, arm: str = "") -> list[int]:
        """Positions of the action's numbers in that unit (and of that arm)."""
        dimensions = self.run.script.interface.action.dimensions
        return [n for n, d in enumerate(dimensions) if d.unit == unit and arm in ("", d.arm)]

    @cached_property
    def joints(self) -> list[int]:
        """The joints."""
        return self.numbers_of("rad")

    @cached_property
    def exchanged(self) -> NDArray[np.int64] | None:
        """For each number its like in the other arm; None for one arm."""
        dimensions = self.run.script.interface.action.dimensions
        left, right = ([n for n, d in enumerate(dimensions) if d.arm == arm] for arm in ("left", "right"))
        if not left or len(left) != len(right):
            return None
        order = np.arange(len(dimensions))
        order[left], order[right] = right, left
        return order

    def agreement(self, numbers: Sequence[int], order: NDArray[np.int64] | None = None) -> float:
        """Mean likeness of the numbers' motion to that of the numbers in `order` (their own, without one)."""
        return float(np.mean([self.table[n, n if order is None else order[n]] for n in numbers]))

    @cached_property
    def arms_are_exchanged(self) -> bool:
        """Whether the other arm explains the motion better."""
        order = self.exchanged
        return order is not None and self.agreement(self.joints, order) > self.agreement(self.joints) + MARGIN

    @cached_property
    def best_order(self) -> tuple[dict[int, int], float]:
        """For each joint the one that its motion is most like, within the arm that moves, and the mean likeness."""
        best: dict[int, int] = {}
        for arm in ("left", "right"):
            own = self.numbers_of("rad", arm)
            others = own
            if self.arms_are_exchanged and self.exchanged is not None:
                others = [int(self.exchanged[n]) for n in own]
            for place, number in enumerate(own):
                likenesses = [self.table[number, other] for other in others]
                top = int(np.argmax(likenesses))
                # The stated place keeps it unless another one is clearly better.
                best[number] = others[top if likenesses[top] > likenesses[place] + MARGIN else place]
        return best, float(np.mean([self.table[number, other] for number, other in best.items()]))

    @cached_property
    def unrest(self) -> float:
        """What the picture changed by when the reset state was sent as an action, as a share of a joint's sweep."""
        hold = self.run.traces["hold"]
        if not hold.frames:
            return float("nan")
        # Early: a world model's picture drifts away from the reset frame by and by.
        moved = grey_map(hold.frames[_early(hold.frames)]) - grey_map(hold.opened.frame)
        return size(moved) / max(float(np.median([size(self.reference.sweeps[n]) for n in self.joints])), 1e-9)

    @property
    def in_world_model(self) -> bool:
        """Whether the pictures are drawn by a world model."""
        return self.run.contract.provenance.kind == "world_model"

    @property
    def moves(self) -> bool:
        """Whether there is enough motion to read."""
        return float(np.median(self.strength[self.joints])) > FAINT

    def name(self, number: int) -> str:
        """A number's name in the contract."""
        return self.run.script.interface.action.dimensions[number].name

    def sweep_strip(self, numbers: Sequence[int]) -> tuple[tuple[str, NDArray[np.uint8]], ...]:
        """Frames at the ends of those numbers' sweeps."""
        pictures = [("reset", self.run.traces["hold"].opened.frame)]
        for episode, moved in enumerate(self.run.sweeps):
            for slot, number in enumerate(moved):
                for at, sign in ((UP_AT, "+"), (DOWN_AT, "-")):
                    frame = self.run.traces[f"sweep {episode}"].frames.get(slot * SLOT + at)
                    if number in numbers and frame is not None:
                        pictures.append((f"{self.name(number)} {sign}", frame))
        return tuple(pictures[:9])

    def excursion_strip(self, frames: Sequence[int]) -> tuple[tuple[str, NDArray[np.uint8]], ...]:
        """Frames of the excursion."""
        stored = self.run.traces["excursion"].frames
        return tuple((f"after action {at}", stored[at]) for at in frames if at in stored)

    def nearest_level(self, position: int) -> float:
        """Which level of the reference (0: home) the excursion's frame shows; `position` in `Motion.levels`."""
        known = {0.0: np.zeros_like(self.reference.levels[0])}
        known |= {level: self.reference.levels[number] for number, level in enumerate(LEVELS)}
        seen = self.motion.levels[position]
        return min(known, key=lambda level: size(seen - known[level]))


def arms(wiring: Wiring) -> Finding:
    """Does the arm that is told to move, move?"""
    probe, question = "arms", "Does the arm that is told to move, move?"
    order = wiring.exchanged
    if order is None:
        return not_applicable(probe, question, "the interface has not two arms of as many dimensions")
    if not wiring.joints:
        return not_applicable(probe, question, "the interface has no joint")
    own, other = wiring.agreement(wiring.joints), wiring.agreement(wiring.joints, order)
    if max(own, other) < MARGIN:
        return not_applicable(probe, question, "the motion is like neither arm's; see the other probes")
    return Finding(
        probe, question, found(wiring.arms_are_exchanged),
        f"the motion is {own:.2f} like that of the arm told to move, {other:.2f} like that of the other",
        "The two arms' blocks are exchanged between sender and target: compare the order of action.dimensions."
        if wiring.arms_are_exchanged else "",
        {"likeness_own_arm": own, "likeness_other_arm": other},
        wiring.sweep_strip([wiring.joints[0], int(order[wiring.joints[0]])]),
    )  # fmt: skip


def joint_order(wiring: Wiring) -> Finding:
    """Does each joint that is told to move, move?"""
    probe, question = "joint_order", "Does each joint that is told to move, move?"
    if not wiring.joints:
        return not_applicable(probe, question, "the interface has no joint")
    if not wiring.moves:
        return not_applicable(probe, question, "too little moves to tell joints apart; see the probe units")
    best, explained = wiring.best_order
    stated = {number: number for number in best}
    if wiring.arms_are_exchanged and wiring.exchanged is not None:
        stated = {number: int(wiring.exchanged[number]) for number in best}
    wrong = {number: other for number, other in best.items() if other != stated[number]}
    fault = len(wrong) >= 2 and explained > EXPLAINED
    listed = ", ".join(f"{wiring.name(n)} moves {wiring.name(other)}" for n, other in list(wrong.items())[:4])
    return Finding(
        probe, question, found(fault),
        f"{len(wrong)} of {len(best)} joints move as another joint does; the best order explains {explained:.2f}",
        f"The order of the joints differs between sender and target: {listed}." if fault else "",
        {"joints_misplaced": len(wrong), "likeness_best_order": explained},
        wiring.sweep_strip(wiring.joints[:4]),
    )  # fmt: skip


def gripper_sense(wiring: Wiring) -> Finding:
    """Does a gripper that is told to close, close?"""
    probe, question = "gripper_sense", "Does a gripper that is told to close, close?"
    grippers = wiring.numbers_of("fraction")
    if not grippers:
        return not_applicable(probe, question, "the interface has no gripper")
    order = wiring.exchanged if wiring.arms_are_exchanged else None
    values = [wiring.table[n, n if order is None else order[n]] for n in grippers]
    if float(np.mean(wiring.strength[grippers])) < FAINT:
        return not_applicable(probe, question, "the fingers' motion is too faint in this target's pictures")
    value = float(np.mean(values))
    if abs(value) < MARGIN:
        return not_applicable(probe, question, "the fingers' motion is not drawn as in the reference, nor reversed")
    return Finding(
        probe, question, found(value < -MARGIN),
        f"the fingers' motion is {value:+.2f} like the reference's (-1: the reverse)",
        "Open and closed are exchanged: the contract's sense is 0 closed, 1 open." if value < -MARGIN else "",
        {"likeness": value}, wiring.sweep_strip(grippers),
    )  # fmt: skip


def units(wiring: Wiring) -> Finding:
    """Does a joint move as far as it is told?"""
    probe, question = "units", "Does a joint move as far as it is told?"
    if not wiring.joints:
        return not_applicable(probe, question, "the interface has no joint")
    share = float(np.median(wiring.strength[wiring.joints]))
    if np.isnan(share):
        return not_applicable(probe, question, NO_FRAMES)
    fault = not FAINT < share < 1 / FAINT
    return Finding(
        probe, question, found(fault), f"the joints' motion is {share:.3f} times the reference's",
        "Radians are taken for degrees (or the reverse), or actions are scaled twice." if fault else "",
        {"motion_share": share}, wiring.sweep_strip(wiring.joints[:4]),
    )  # fmt: skip


def action_space(wiring: Wiring) -> Finding:
    """Are the numbers joint targets at all?"""
    probe, question = "action_space", "Are the numbers what the contract's action space says?"
    if not wiring.joints:
        return not_applicable(probe, question, "the interface has no joint")
    own = wiring.agreement(wiring.joints)
    explained = max(wiring.best_order[1], own)
    restless = wiring.unrest > RESTLESS
    if not wiring.moves and not restless:
        return not_applicable(probe, question, "too little moves; see the probe units")
    fault = restless or explained < ALIKE
    return Finding(
        probe, question, found(fault),
        f"the motion is {own:.2f} like the reference's, {explained:.2f} in its best order; the reset state sent as an "
        f"action moves {wiring.unrest:.2f} of what a joint's sweep does",
        "The target reads another action space, for example end-effector poses where joint targets are sent."
        if fault else "",
        {"likeness": own, "likeness_best_order": explained, "unrest": wiring.unrest},
        (*_at_rest(wiring.run), *wiring.sweep_strip(wiring.joints[:2])),
    )  # fmt: skip


def _at_rest(run: Run) -> tuple[tuple[str, NDArray[np.uint8]], ...]:
    frames = run.traces["hold"].frames
    return (("reset state sent as an action", frames[_early(frames)]),) if frames else ()


def _early(frames: Mapping[int, NDArray[np.uint8]]) -> int:
    """The first frame at which an arm that was sent elsewhere has moved visibly."""
    return min((at for at in frames if at >= UP_AT), default=max(frames))


def normalisation(wiring: Wiring) -> Finding:
    """Do far targets arrive?"""
    probe, question = "normalisation", "Do targets far from home arrive, or are they cut to a narrower range?"
    seen = [wiring.nearest_level(number) for number in range(len(LEVELS))]
    if seen[0] != LEVELS[0]:
        return not_applicable(probe, question, "already the near target does not arrive; see the other probes")
    fault = seen[-1] < LEVELS[-1]
    return Finding(
        probe, question, found(fault),
        "targets at " + ", ".join(f"{level:.2f}" for level in LEVELS) + " of the path look like "
        + ", ".join(f"{level:.2f}" for level in seen),
        "Targets are cut to the range of normalisation statistics (percentiles of somebody's data)." if fault else "",
        {f"level_{level}": value for level, value in zip(LEVELS, seen, strict=True)},
        wiring.excursion_strip([SLOT * (n + 1) for n in range(len(LEVELS))]),
    )  # fmt: skip


def delta(wiring: Wiring) -> Finding:
    """Does the world stand while the target stands?"""
    probe, question = "delta", "Does the arm stand while its target stands?"
    known = max(size(wiring.reference.levels[0]), 1e-9)
    pairs = {
        f"{SETTLED_AT}-{SLOT}": size(wiring.motion.settled[1] - wiring.motion.settled[0]) / known,
        f"{len(LEVELS) * SLOT}-{HOLD_UNTIL}": size(wiring.motion.levels[3] - wiring.motion.levels[2]) / known,
    }
    if np.isnan(list(pairs.values())).any():
        return not_applicable(probe, question, NO_FRAMES)
    worst = max(pairs.values())
    fault = worst > (MODEL_MOVES_ON if wiring.in_world_model else MOVES_ON)
    return Finding(
        probe, question, found(fault),
        f"while the target stood, the picture changed by up to {worst:.2f} of a whole level's change",
        "Absolute targets are taken for changes and added up (action.space)." if fault else "",
        {f"change_{name}": value for name, value in pairs.items()},
        wiring.excursion_strip([SETTLED_AT, SLOT, len(LEVELS) * SLOT, HOLD_UNTIL]),
    )  # fmt: skip


def timing(wiring: Wiring) -> Finding:
    """Does frame k show the world after action k?"""
    probe, question = "timing", "Does frame k show the world after action k?"
    if np.isnan(wiring.motion.onset).any() or np.isnan(wiring.reference.onset).any():
        return not_applicable(probe, question, NO_FRAMES)
    if size(wiring.motion.onset) < FAINT * size(wiring.reference.onset):
        return not_applicable(probe, question, "too little moves; see the other probes")
    most = max(LAGS)
    seen = wiring.motion.onset[most:-most]
    count = len(wiring.reference.onset)
    errors = {lag: size(seen - wiring.reference.onset[most - lag : count - most - lag]) for lag in LAGS}
    best = min(errors, key=lambda lag: errors[lag])
    if best != 0 and errors[best] > CLEARER * errors[0]:
        why = "the target does not draw this motion as the reference does, so that no lag can be read from it"
        return not_applicable(probe, question, why)
    fault = best != 0
    late = f"frame{'s' if abs(best) > 1 else ''} {'late' if best > 0 else 'early'}"
    return Finding(
        probe, question, found(fault),
        f"the motion fits the reference best {abs(best)} {late}" if fault else "the motion fits frame by frame",
        "Frames and actions are offset: frame k must show the world after action k, counting from 1." if fault else "",
        {"lag_frames": best, **{f"error_lag_{lag}": value for lag, value in errors.items()}},
        wiring.excursion_strip(range(HOME_AT + 9, HOME_AT + 17)),
    )  # fmt: skip


def silent_hold(wiring: Wiring) -> Finding:
    """Does the arm come back when it is told to come back at once?"""
    probe, question = "silent_hold", "Does a far target in one chunk move the arm, or does it silently stay?"
    if wiring.nearest_level(len(LEVELS) - 1) == 0.0:
        return not_applicable(probe, question, "the arm never left; see the other probes")
    there, back = wiring.motion.levels[3], wiring.motion.levels[4]
    if np.isnan(there).any() or np.isnan(back).any():
        return not_applicable(probe, question, NO_FRAMES)
    stayed = size(back - there) / max(size(there), 1e-9)
    fault = stayed < STALE_SHARE
    return Finding(
        probe, question, found(fault),
        f"told to go home in one chunk, the picture changed by {stayed:.2f} of what it had changed on the way out",
        "A motion planner failed and the target held still while it reported the actions as executed." if fault else "",
        {"change_share": stayed}, wiring.excursion_strip([HOLD_UNTIL, HOME_AT]),
    )  # fmt: skip


# In the order in which they explain each other: poses read as joints move too little, sums move like no joint.
PROBES: tuple[Callable[[Wiring], Finding], ...] = (
    arms, joint_order, gripper_sense, delta, action_space, units, normalisation, timing, silent_hold,
)  # fmt: skip
QUESTIONS = {probe.__name__: (probe.__doc__ or "").partition("\n")[0] for probe in PROBES}


def inspect(run: Run, motion: Motion, reference: Motion | None) -> list[Finding]:
    """All probes of what actions do."""
    if reference is None:
        why = (
            "no reference is recorded for this interface: record one on a target that is known to be right with "
            "`worldserve contract probe TARGET --record FILE`, and give it as --reference"
        )
        return [not_applicable(name, question, why) for name, question in QUESTIONS.items()]
    shape: Maps = reference.sweeps
    if shape.shape != motion.sweeps.shape:
        why = f"the reference's maps are {shape.shape[2:]}, this target's {motion.sweeps.shape[2:]}"
        return [not_applicable(name, question, why) for name, question in QUESTIONS.items()]
    wiring = Wiring(run, motion, reference)
    return [probe(wiring) for probe in PROBES]
