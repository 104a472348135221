"""The threshold on an episode's peak probability, chosen on validation episodes by the function that serves.

The study (REFERENCE.md section 1) reads frames 51-200, takes the peak and compares it with a threshold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Threshold:
    """A chosen `value` in (0, 1), and what it does on the episodes it was chosen on."""

    value: float
    fake_success: float
    recall: float
    failures: int
    successes: int


def choose_threshold(peaks: ArrayLike, success: ArrayLike, max_fake_success: float = 0.03) -> Threshold:
    """Most recall with at most `max_fake_success` of the failures read as success, in the middle of the gap.

    An episode is read as success when its peak is at least the threshold. Between the lowest success peak that is still
    to be read as success and the highest failure peak below it, the threshold lies in the middle of their log-odds:
    probabilities crowd at 0 and 1.

    Args:
        peaks: float (n,), the episodes' peak probabilities, in [0, 1].
        success: bool (n,), the simulator's labels; both kinds must be there.
        max_fake_success: largest allowed fraction of failures read as success.

    Raises:
        ValueError: on bad input, or where no success peaks above the failures that must stay below.
    """
    values, truth = np.asarray(peaks, np.float64), np.asarray(success, bool)
    if values.ndim != 1 or values.shape != truth.shape or not np.isfinite(values).all():
        raise ValueError(f"peaks: expected finite (n,) beside success (n,); got {values.shape} and {truth.shape}")
    if ((values < 0) | (values > 1)).any():
        raise ValueError("peaks: expected probabilities in [0, 1]")
    if truth.all() or not truth.any():
        raise ValueError(f"success: expected successes and failures; got {int(truth.sum())} of {len(truth)}")
    if not 0 <= max_fake_success < 1:
        raise ValueError(f"max_fake_success: expected a number in [0, 1); got {max_fake_success!r}")
    failures, successes = np.sort(values[~truth])[::-1], values[truth]
    allowed = int(np.floor(max_fake_success * len(failures) + 1e-9))
    ceiling = failures[allowed]  # this failure, and all below it, must be read as failure
    above = successes[successes > ceiling]
    if not len(above):
        raise ValueError(
            f"peaks: expected successes above {ceiling:.4f}, where {1 - max_fake_success:.0%} of the failures end; the "
            "classifier does not separate them. Train longer, or look at the labels."
        )
    lowest = float(above.min())
    highest = float(failures[failures < lowest].max())  # not empty: `ceiling` is one
    value = _sigmoid((_logit(highest) + _logit(lowest)) / 2.0)
    if not highest < value <= lowest:  # the two are neighbouring floating-point numbers
        value = lowest
    return Threshold(
        value=value,
        fake_success=float((failures >= value).mean()),
        recall=float((successes >= value).mean()),
        failures=len(failures),
        successes=len(successes),
    )


def _logit(probability: float) -> float:
    clipped = min(max(probability, 1e-9), 1.0 - 1e-9)
    return float(np.log(clipped / (1.0 - clipped)))


def _sigmoid(logit: float) -> float:
    return float(1.0 / (1.0 + np.exp(-logit)))


def episode_peaks(probabilities: NDArray[np.float32]) -> NDArray[np.float32]:
    """Peaks float32 (n,) of probabilities (n, frames), the frames of the contract's range only."""
    if probabilities.ndim != 2 or not probabilities.shape[1]:
        raise ValueError(f"probabilities: expected (episodes, frames >= 1); got {probabilities.shape}")
    return np.asarray(probabilities.max(axis=1), np.float32)
