"""PSNR, PSNR of what moves, SSIM: against values worked out by hand and, where it is installed, scikit-image."""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.trainer.image_quality import decibels, image_errors, luma, pool, structural_similarity

C1, C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2


def grey(*levels: int) -> np.ndarray:
    """Frames of one grey each, uint8 (n, 16, 16, 3)."""
    return np.stack([np.full((16, 16, 3), level, np.uint8) for level in levels])


@pytest.mark.parametrize(
    ("squared", "values", "expected"),
    [
        (100.0, 100, 48.1308),  # mean squared error 1: 20 log10 255
        (10_000.0, 100, 28.1308),
        (65_025.0, 1, 0.0),
        (0.0, 100, None),
        (0.0, 0, None),
    ],
)
def test_decibels(squared: float, values: int, expected: float | None) -> None:
    assert decibels(squared, values) == (None if expected is None else pytest.approx(expected, abs=1e-4))


@pytest.mark.parametrize("squared", [math.nan, math.inf, -1.0])
def test_decibels_refuse_what_is_no_sum_of_squares(squared: float) -> None:
    with pytest.raises(ValueError, match="expected a finite sum"):
        decibels(squared, 10)


def test_frame_zero_does_not_count() -> None:
    errors = image_errors(grey(0, 50, 50), grey(200, 50, 50))
    assert (errors.squared, errors.psnr_db, errors.ssim, errors.frames) == (0.0, None, pytest.approx(1.0), 2)


def test_only_pixels_where_the_reference_left_its_first_frame_move() -> None:
    reference, target = grey(100, 100), grey(100, 100)
    reference[1, :2] = 112  # 12 levels: not more than the threshold
    reference[1, 2:4, :, 2] = 113  # two rows of 16 pixels, in one colour
    target[1, 3:5] = 104  # moving: row 3; still: row 4
    errors = image_errors(reference, target)
    assert errors.moving_values == 2 * 16 * 3
    # Row 2: blue missed by 13. Row 3: red and green 4 off, blue 9.
    assert errors.moving_squared == 16 * (13**2 + 4**2 + 4**2 + 9**2)
    assert errors.squared == errors.moving_squared + 2 * 16 * 3 * 12**2 + 16 * 3 * 4**2
    assert errors.values == 16 * 16 * 3


def test_a_difference_beyond_a_byte_does_not_wrap_around() -> None:
    assert image_errors(grey(0, 0), grey(0, 255)).psnr_db == 0.0


def test_sums_are_pooled_and_not_decibels() -> None:
    one, other = image_errors(grey(0, 10), grey(0, 12)), image_errors(grey(0, 10, 10), grey(0, 10, 10))
    pooled = pool([one, other.as_dict()])
    assert pooled is not None
    # One frame of three with a squared error of 4.
    assert pooled.psnr_db == pytest.approx(10 * math.log10(255**2 / (4 / 3)))
    assert pooled.ssim == pytest.approx((one.ssim + 2 * 1.0) / 3)
    assert pool([]) is None


@pytest.mark.parametrize(("first", "second"), [(0, 255), (100, 110), (50, 50)])
def test_ssim_of_plain_frames_compares_their_brightness_alone(first: int, second: int) -> None:
    expected = (2 * first * second + C1) / (first**2 + second**2 + C1)
    [got] = structural_similarity(np.full((1, 16, 16), float(first)), np.full((1, 16, 16), float(second)))
    assert got == pytest.approx(expected, abs=1e-9)


def test_ssim_of_one_window_is_the_formula_with_gaussian_weights() -> None:
    generator = np.random.default_rng(5)
    x, y = generator.uniform(0, 255, (2, 11, 11))
    offsets = np.arange(-5, 6)
    weights = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    mean_x, mean_y = (weights * x).sum(), (weights * y).sum()
    variance_x, variance_y = (weights * (x - mean_x) ** 2).sum(), (weights * (y - mean_y) ** 2).sum()
    covariance = (weights * (x - mean_x) * (y - mean_y)).sum()
    expected = (2 * mean_x * mean_y + C1) * (2 * covariance + C2)
    expected /= (mean_x**2 + mean_y**2 + C1) * (variance_x + variance_y + C2)
    assert structural_similarity(x[None], y[None])[0] == pytest.approx(expected, abs=1e-12)


def test_ssim_agrees_with_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics")
    x, y = luma(np.random.default_rng(1).integers(0, 256, (2, 3, 40, 52, 3)).astype(np.uint8))
    for got, first, second in zip(structural_similarity(x, y), x, y):
        settings = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 255}
        assert got == pytest.approx(metrics.structural_similarity(first, second, **settings), abs=1e-9)


@pytest.mark.parametrize(
    ("reference", "target", "message"),
    [
        (grey(1, 2), grey(1, 2, 3), "target: expected frames of shape"),
        (grey(1), grey(1), "reference: expected uint8"),
        (grey(1, 2), grey(1, 2).astype(np.float32), "target: expected uint8"),
        (grey(1, 2)[:, :10], grey(1, 2)[:, :10], "height >= 11"),
    ],
)
def test_what_cannot_be_compared_is_refused(reference: np.ndarray, target: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image_errors(reference, target)
