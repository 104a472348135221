"""Checks of what callers send and what backends return."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from worldserve.contract import Interface
from worldserve.messages import ItemError
from worldserve.serving import errors


def check_actions(name: str, actions: NDArray[np.float32], interface: Interface) -> ItemError | None:
    """Why `actions` are not a chunk of the contract: float32 (chunk_actions, dimensions), all finite."""
    shape = (interface.timing.chunk_actions, interface.action_dimensions)
    if actions.dtype != np.float32:
        return errors.invalid(
            f"{name}.actions", "dtype float32", f"dtype {actions.dtype}", "Convert before sending.", "WRONG_DTYPE"
        )
    if actions.shape != shape:
        return errors.invalid(
            f"{name}.actions", f"shape {shape}", f"shape {actions.shape}",
            "Send a whole chunk in the contract's action layout.", "WRONG_SHAPE",
        )  # fmt: skip
    finite = np.isfinite(actions)
    if not finite.all():
        row, column = (int(value) for value in np.argwhere(~finite)[0])
        return errors.invalid(
            f"{name}.actions[{row}, {column}]", "a finite number", repr(float(actions[row, column])),
            "Has the policy diverged? Nothing was run.", "NON_FINITE_ACTION",
        )  # fmt: skip
    return None


def check_frames(frames: NDArray[np.uint8], count: int, interface: Interface) -> str | None:
    """What is wrong with `count` frames of a backend, as text for the log."""
    shape = (count, interface.observation.height, interface.observation.width, 3)
    if frames.dtype == np.uint8 and (frames.shape == shape or count == len(frames) == 0):
        return None
    return f"frames: expected uint8 {shape} of the backend; got {frames.dtype} {frames.shape}"
