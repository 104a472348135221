"""What the episode that succeeds tells where the slow test motions tell nothing.

A world model is sharp where it was trained. The excursion and the sweeps are no motions of a task, and bwm-mini draws
them roughly; the way to the object, and the object in the hand, it draws well. So timing, range and the grippers' sense
are read from those where the excursion and the sweeps cannot be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from worldserve.probing.motion import size
from worldserve.probing.reference import Maps, Motion
from worldserve.probing.run import Run
from worldserve.probing.script import WAYS

LAGS = tuple(range(-5, 6))
"""Lags (frames) that a way of the successful episode is tried at; the best one must lie within."""
OFF_BY = 0.6
"""Mean lag (frames) of both ways from which frames and actions count as offset. bwm-mini: -0.02 to -0.01 clean, 0.98
with an offset of one; the simulator 0.00 and 1.00. One way alone does not do: bwm-mini runs ahead on the way out
(-0.32) and is late on the way up (0.29)."""
APART = 1.5
"""What the two ways' lags may differ by (bwm-mini: 0.6 clean, 0.9 with an offset)."""
HELD = 0.1
"""Likeness to the reference's difference between a hand that closes at the object and one that opens there: the
simulator 1.00, and -1.00 with open and closed exchanged; bwm-mini, which lets either hand lift it, 0.25 and -0.25."""
BEGUN, CUT_SHORT = 0.25, 0.75
"""Shares of the way out between which targets were cut (below: none was followed). bwm-mini: 1.03 clean, 0.41 cut to
0.5 rad around home; the simulator 1.00 and 0.35."""
ON_COURSE = 0.5
"""Likeness of the frames to the reference's nearest, below which it is another way."""
LAST = 10
"""Frames of the way out that stand for its end."""


def lag_errors(seen: Maps, known: Maps, lags: Sequence[int]) -> dict[int, float]:
    """What each lag of `seen` behind `known`, (frames, rows, columns), leaves unexplained; {} without all frames."""
    most, count = max(lags), len(known)
    if seen.shape != known.shape or count <= 2 * most or np.isnan(seen).any() or np.isnan(known).any():
        return {}
    return {lag: size(seen[most:-most] - known[most - lag : count - most - lag]) for lag in lags}


def mean_lag(seen: Motion, known: Motion) -> tuple[float, dict[str, float]] | None:
    """By how many frames the successful episode lags behind the reference's, and each way's; None where none fits."""
    lags = [
        _between(lag_errors(way, known_way, LAGS)) for way, known_way in zip(seen.course, known.course, strict=True)
    ]
    found = [lag for lag in lags if lag is not None]
    if len(found) < len(lags) or max(found) - min(found) > APART:
        return None
    return float(np.mean(found)), {f"lag_way_{number + 1}_frames": lag for number, lag in enumerate(found)}


def _between(errors: Mapping[int, float]) -> float | None:
    """The lag at the lowest point of the parabola through the smallest squared error and its neighbours."""
    best = min(errors, key=lambda lag: errors[lag], default=None)
    if best is None or best in (min(errors), max(errors)):
        return None
    before, at, after = (errors[best + step] ** 2 for step in (-1, 0, 1))
    bend = before - 2 * at + after
    return best + 0.5 * (before - after) / bend if bend > 0 else None


def reach(seen: Motion, known: Motion) -> float | None:
    """How far along the reference's way out the last frames of it come, 1: to its end; None where it is another way."""
    way, known_way = (np.asarray(m.course[0], np.float64).reshape(m.course.shape[1], -1) for m in (seen, known))
    if way.shape != known_way.shape or np.isnan(way).any() or np.isnan(known_way).any():
        return None
    ends = way[-LAST:]
    nearest = np.square(ends[:, None] - known_way[None]).sum(-1).argmin(1)
    pairs = [(end, known_way[at]) for end, at in zip(ends, nearest, strict=True)]
    likeness = float(np.mean([_cosine(end, other) for end, other in pairs]))
    share = float((nearest + 1).mean() / (len(way) - (LAST - 1) / 2))
    return share if likeness >= ON_COURSE and share >= BEGUN else None


def grasp_likeness(seen: Motion, known: Motion) -> float:
    """How like the reference's the difference between closing and opening the hand at the object is: 1, -1 reversed."""
    return _cosine(seen.grasp, known.grasp)


def _cosine(first: NDArray[np.floating], second: NDArray[np.floating]) -> float:
    one, other = (np.asarray(value, np.float64).ravel() for value in (first, second))
    both = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / both if both > 0 else 0.0 if both == 0 else float("nan")


def course_strip(run: Run) -> tuple[tuple[str, NDArray[np.uint8]], ...]:
    """Frames of the way out."""
    stored = run.traces["success"].frames if "success" in run.traces else {}
    return tuple((f"after action {at}", stored[at]) for at in run.script.frames_of(WAYS[0])[4::5] if at in stored)


def ends_strip(run: Run) -> tuple[tuple[str, NDArray[np.uint8]], ...]:
    """The ends of the successful episode and of that with the grippers reversed."""
    return tuple(
        (name, run.traces[name].frames[max(run.traces[name].frames)])
        for name in ("success", "grippers reversed")
        if name in run.traces and run.traces[name].frames
    )
