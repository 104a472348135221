"""From a run's frames to small maps of what moved."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from worldserve.probing.reference import Maps, Motion
from worldserve.probing.run import Run, Trace
from worldserve.probing.script import (
    DOWN_AT,
    GRASP,
    HOLD_UNTIL,
    HOME_AT,
    LEVELS,
    ONSET_UNTIL,
    SETTLED_AT,
    SLOT,
    UP_AT,
    WAYS,
)

ROWS = 24
"""Rows of a map at least; a block of pixels becomes one number."""
ORIENTATIONS = {
    "as stated": (slice(None), slice(None)),
    "mirrored": (slice(None), slice(None, None, -1)),
    "upside down": (slice(None, None, -1), slice(None)),
    "turned by 180 degrees": (slice(None, None, -1), slice(None, None, -1)),
}


def grey_map(frame: NDArray[np.uint8], orientation: str = "as stated") -> Maps:
    """A frame, uint8 (height, width, 3), as grey means of blocks, float32 (rows, columns), turned the right way."""
    grey = frame[ORIENTATIONS[orientation]].astype(np.float32).mean(-1)
    block = max(1, grey.shape[0] // ROWS)
    rows, columns = grey.shape[0] // block, grey.shape[1] // block
    return grey[: rows * block, : columns * block].reshape(rows, block, columns, block).mean((1, 3))


def measure(run: Run, orientation: str = "as stated") -> Motion:
    """What moved in a run; NaN where the target gave no frame."""
    holding = {at: grey_map(frame, orientation) for at, frame in run.traces["hold"].frames.items()}
    empty = np.full_like(grey_map(run.traces["hold"].opened.frame), np.nan)

    def moved(trace: Trace, at: int) -> Maps:
        if at not in trace.frames or at not in holding:
            return empty
        return grey_map(trace.frames[at], orientation) - holding[at]

    sweeps = np.full((run.script.interface.action_dimensions, 2, *empty.shape), np.nan, np.float32)
    for number, numbers in enumerate(run.sweeps):
        for slot, dimension in enumerate(numbers):
            trace = run.traces[f"sweep {number}"]
            sweeps[dimension] = [moved(trace, slot * SLOT + UP_AT), moved(trace, slot * SLOT + DOWN_AT)]
    excursion = run.traces["excursion"]
    halts = [SLOT * (number + 1) for number in range(len(LEVELS))]
    before = excursion.frames.get(HOME_AT)
    onset = [
        grey_map(excursion.frames[at], orientation) - grey_map(before, orientation)
        if before is not None and at in excursion.frames
        else empty
        for at in range(HOME_AT + 1, ONSET_UNTIL + 1)
    ]
    success, late = run.traces.get("success"), run.traces.get("late start")
    history = empty
    if success is not None and late is not None and success.elapsed == late.elapsed == run.script.limit:
        both = (success.frames[run.script.limit], late.frames[run.script.limit])
        history = grey_map(both[0], orientation) - grey_map(both[1], orientation)
    return Motion(
        sweeps=sweeps,
        levels=np.stack([moved(excursion, at) for at in (*halts, HOLD_UNTIL, HOME_AT)]),
        settled=np.stack([moved(excursion, SETTLED_AT), moved(excursion, SLOT)]),
        onset=np.stack(onset).astype(np.float32),
        history=history,
        course=np.array([_way(run, part, empty, orientation) for part in WAYS], np.float32),
        grasp=_grasp(run, empty, orientation),
    )


def _way(run: Run, part: tuple[float, float], empty: Maps, orientation: str) -> list[Maps]:
    """Every frame of a part of the episode that succeeds less its frame 0."""
    success, wanted = run.traces.get("success"), run.script.frames_of(part)
    if success is None:
        return [empty] * len(wanted)
    start = grey_map(success.opened.frame, orientation)
    stored = success.frames
    return [grey_map(stored[at], orientation) - start if at in stored else empty for at in wanted]


def _grasp(run: Run, empty: Maps, orientation: str) -> Maps:
    """What the grippers make of the middle: the mean of the success less that of the reversed grippers."""
    success, mirrored = run.traces.get("success"), run.traces.get("grippers reversed")
    if success is None or mirrored is None:
        return empty
    both = [at for at in run.script.frames_of(GRASP) if at in success.frames and at in mirrored.frames]
    gaps = [grey_map(success.frames[at], orientation) - grey_map(mirrored.frames[at], orientation) for at in both]
    mean: Maps = np.mean(gaps, axis=0, dtype=np.float32) if gaps else empty
    return mean


def size(maps: Maps) -> float:
    """Root of the sum of squares; NaN where a frame is missing."""
    return float(np.sqrt(np.square(maps.astype(np.float64)).sum()))
