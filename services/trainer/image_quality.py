"""How like two videos are, pixel by pixel: PSNR, PSNR of what moves, and SSIM.

These figures hide what matters most here, whether an outcome is right; they stand beside it, never for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOVING_THRESHOLD = 12.0
# Wang, Bovik, Sheikh and Simoncelli 2004, section III.C: an 11 x 11 Gaussian window of 1.5 pixels, K1 and K2.
_WINDOW_SIGMA, _WINDOW_RADIUS, _K1, _K2 = 1.5, 5, 0.01, 0.03
_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601


@dataclass(frozen=True)
class ImageErrors:
    """Summed squared errors of one or several videos, from which decibels follow; sums pool, decibels do not.

    Attributes:
        squared: sum over all values (every frame, pixel and colour) of the squared error, in grey levels of 0 to 255.
        values: how many values these are.
        moving_squared, moving_values: the same over moving pixels alone.
        ssim: mean over frames.
        frames: how many frames.
    """

    squared: float
    values: int
    moving_squared: float
    moving_values: int
    ssim: float
    frames: int

    @property
    def psnr_db(self) -> float | None:
        """Peak signal-to-noise ratio [dB]; None where no value differs, since it would be infinite."""
        return decibels(self.squared, self.values)

    @property
    def moving_psnr_db(self) -> float | None:
        """The same over moving pixels; None where nothing moves, or no moving value differs."""
        return decibels(self.moving_squared, self.moving_values)

    def as_dict(self) -> dict[str, float | int]:
        """The fields, for JSON."""
        return asdict(self)


def decibels(squared: float, values: int) -> float | None:
    """10 log10(255^2 / (squared / values)); None for no values or no error. Raises ValueError unless it is finite."""
    if values == 0 or squared == 0.0:
        return None
    ratio = 10.0 * math.log10(255.0**2 * values / squared) if squared > 0.0 and math.isfinite(squared) else math.nan
    if not math.isfinite(ratio):
        raise ValueError(f"squared: expected a finite sum of squared errors of at least 0; got {squared}")
    return ratio


def pool(errors: Iterable[ImageErrors | Mapping[str, Any]]) -> ImageErrors | None:
    """Errors of several videos as those of one, each frame weighing the same; None where there is no video."""
    found = [error if isinstance(error, ImageErrors) else ImageErrors(**error) for error in errors]
    frames = sum(error.frames for error in found)
    if not frames:
        return None
    return ImageErrors(
        squared=math.fsum(error.squared for error in found),
        values=sum(error.values for error in found),
        moving_squared=math.fsum(error.moving_squared for error in found),
        moving_values=sum(error.moving_values for error in found),
        ssim=math.fsum(error.ssim * error.frames for error in found) / frames,
        frames=frames,
    )


def image_errors(
    reference: NDArray[np.uint8], target: NDArray[np.uint8], moving_threshold: float = MOVING_THRESHOLD
) -> ImageErrors:
    """Errors of `target` against `reference`, both uint8 (n >= 2, height, width, 3) RGB, without frame 0.

    Frame 0 is what both were given, and the only frame that an open-loop prediction knows. A pixel of frame k moves
    where the *reference* differs there from its frame 0 by more than `moving_threshold` of 255 in any colour.
    """
    for name, frames in (("reference", reference), ("target", target)):
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or len(frames) < 2:
            raise ValueError(f"{name}: expected uint8 (n >= 2, height, width, 3); got {frames.dtype} {frames.shape}")
    if reference.shape != target.shape:
        raise ValueError(f"target: expected frames of shape {reference.shape} as the reference's; got {target.shape}")
    still = reference[0].astype(np.int16)
    squared = moving_squared = 0.0
    moving_values = 0
    for true, drawn in zip(reference[1:].astype(np.int16), target[1:].astype(np.int16)):
        moved, error = np.abs(true - still) > moving_threshold, np.square((drawn - true).astype(np.int32))
        # Colours one by one: numpy's reductions over an axis of 3 take several times as long.
        moves = moved[..., 0] | moved[..., 1] | moved[..., 2]
        of_pixels = error[..., 0] + error[..., 1] + error[..., 2]
        squared += float(of_pixels.sum(dtype=np.int64))
        moving_squared += float(of_pixels[moves].sum(dtype=np.int64))
        moving_values += 3 * int(np.count_nonzero(moves))
    similarity = float(structural_similarity(luma(reference[1:]), luma(target[1:])).mean())
    return ImageErrors(squared, target[1:].size, moving_squared, moving_values, similarity, len(target) - 1)


def luma(frames: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Brightness (..., height, width) in 0 to 255 of RGB frames (..., height, width, 3), ITU-R BT.601."""
    return frames.astype(np.float64) @ _LUMA


def structural_similarity(reference: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean SSIM float64 (n,) of grey frames (n, height, width) in 0 to 255.

    Wang et al. 2004, equation 13 with the constants of section III.C: local means, variances and covariance under a
    Gaussian window of 11 x 11 pixels, averaged over the windows that lie whole within the frame.
    """
    from scipy.ndimage import gaussian_filter

    if reference.shape != target.shape or reference.ndim != 3 or min(reference.shape[1:]) <= 2 * _WINDOW_RADIUS:
        least = 2 * _WINDOW_RADIUS + 1
        raise ValueError(
            f"frames: expected two arrays (n, height >= {least}, width >= {least}); got {reference.shape}, "
            f"{target.shape}"
        )

    def smooth(frames: NDArray[np.float64]) -> NDArray[np.float64]:
        sigmas = (0.0, _WINDOW_SIGMA, _WINDOW_SIGMA)
        smoothed: NDArray[np.float64] = gaussian_filter(frames, sigmas, truncate=_WINDOW_RADIUS / _WINDOW_SIGMA)
        return smoothed[:, _WINDOW_RADIUS:-_WINDOW_RADIUS, _WINDOW_RADIUS:-_WINDOW_RADIUS]

    x, y = reference.astype(np.float64), target.astype(np.float64)
    mean_x, mean_y = smooth(x), smooth(y)
    variance_x = smooth(x * x) - mean_x * mean_x
    variance_y = smooth(y * y) - mean_y * mean_y
    covariance = smooth(x * y) - mean_x * mean_y
    c1, c2 = (_K1 * 255.0) ** 2, (_K2 * 255.0) ** 2
    likeness = ((2.0 * mean_x * mean_y + c1) * (2.0 * covariance + c2)) / (
        (mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2)
    )
    return np.asarray(likeness.mean(axis=(1, 2)), dtype=np.float64)
