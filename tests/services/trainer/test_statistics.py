"""Success statistics, against tables worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from services.trainer.statistics import (
    cluster_interval,
    cluster_ratio,
    cluster_ratio_difference,
    explained_variance,
    paired_bootstrap,
    variance_shares,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "count", "confidence", "low", "high"),
    [
        # Newcombe 1998, table I: Wilson score intervals at 95%.
        (81, 263, 0.95, 0.2553, 0.3662),
        (15, 148, 0.95, 0.0624, 0.1605),
        (0, 20, 0.95, 0.0000, 0.1611),
        (1, 29, 0.95, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_meets_published_table(
    successes: int, count: int, confidence: float, low: float, high: float
) -> None:
    interval = wilson_interval(successes, count, confidence)
    assert interval.low == pytest.approx(low, abs=1e-4)
    assert interval.high == pytest.approx(high, abs=1e-4)


@pytest.mark.parametrize(("successes", "count"), [(-1, 3), (4, 3), (0, 0)])
def test_wilson_interval_refuses_impossible_counts(successes: int, count: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= successes <= count"):
        wilson_interval(successes, count)


def test_paired_bootstrap_of_constant_difference_has_no_width() -> None:
    treated = {"a": [1, 1], "b": [1, 0], "c": [0.5]}
    reference = {"c": [0.0, 0.0], "a": [0, 1], "b": [0, 0]}
    interval = paired_bootstrap(treated, reference, np.random.default_rng(0))
    assert (interval.value, interval.low, interval.high, interval.count) == (0.5, 0.5, 0.5, 3)


def test_paired_bootstrap_of_two_states_enumerates_the_four_resamples() -> None:
    # Differences 0 and 1: resampled means are 0, .5, .5, 1 with probabilities 1/4, 1/2, 1/4.
    interval = paired_bootstrap({"a": [0], "b": [1]}, {"a": [0], "b": [0]}, np.random.default_rng(0), confidence=0.9)
    assert (interval.value, interval.low, interval.high) == (0.5, 0.0, 1.0)
    narrow = paired_bootstrap({"a": [0], "b": [1]}, {"a": [0], "b": [0]}, np.random.default_rng(0), confidence=0.4)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_paired_bootstrap_is_a_function_of_the_generator_and_not_of_the_order() -> None:
    generator = np.random.default_rng(3)
    treated = {f"s{i:03d}": generator.integers(0, 2, 3) for i in range(40)}
    reference = {state: generator.integers(0, 2, 3) for state in treated}
    first = paired_bootstrap(treated, reference, np.random.default_rng(1))
    again = paired_bootstrap(dict(reversed(treated.items())), reference, np.random.default_rng(1))
    assert first == again
    assert first != paired_bootstrap(treated, reference, np.random.default_rng(2))


def test_paired_bootstrap_names_states_that_lack_a_partner() -> None:
    with pytest.raises(ValueError, match=r"only treated: \['b'\]"):
        paired_bootstrap({"a": [1], "b": [1]}, {"a": [1]}, np.random.default_rng(0))


def test_cluster_interval_is_wider_than_treating_episodes_as_independent() -> None:
    # 20 states, each all-success or all-failure: 20 facts, however many episodes.
    per_state = [[i % 2] * 30 for i in range(20)]
    clustered = cluster_interval(per_state, np.random.default_rng(0))
    independent = wilson_interval(300, 600)
    assert clustered.value == 0.5
    assert clustered.high - clustered.low > 3 * (independent.high - independent.low)


def test_cluster_ratio_weighs_episodes_and_counts_the_states_that_have_any() -> None:
    # 1 of 1, 1 of 9, and a state without failures: 2 of 10, not the mean of 1 and 1/9.
    interval = cluster_ratio([1, 1, 0], [1, 9, 0], np.random.default_rng(0))
    assert (interval.value, interval.count) == (0.2, 2)


def test_cluster_ratio_of_two_states_enumerates_the_resamples() -> None:
    # Resampled pairs aa, ab, ba, bb: 2/2, 1/4, 1/4, 0/6 with probability 1/4 each.
    for confidence, low, high in [(0.9, 0.0, 1.0), (0.4, 0.25, 0.25)]:
        interval = cluster_ratio([1, 0], [1, 3], np.random.default_rng(0), confidence)
        assert (interval.value, interval.low, interval.high) == (0.25, low, high)


def test_resamples_without_any_denominator_are_left_out() -> None:
    interval = cluster_ratio([1, 0], [2, 0], np.random.default_rng(0))
    assert (interval.value, interval.low, interval.high, interval.count) == (0.5, 0.5, 0.5, 1)


def test_cluster_ratio_is_wider_where_states_decide() -> None:
    alike = cluster_ratio([5] * 20, [10] * 20, np.random.default_rng(0))
    apart = cluster_ratio([0, 10] * 10, [10] * 20, np.random.default_rng(0))
    assert (alike.value, alike.low, alike.high) == (0.5, 0.5, 0.5)
    assert apart.value == 0.5
    # 20 fair coins: standard deviation 0.11, times 1.645 on each side.
    assert 0.30 < apart.high - apart.low < 0.45


def test_cluster_ratio_difference_takes_both_from_the_same_states() -> None:
    # In each state both ratios are equal, so that their difference never varies.
    table = ([1, 0, 2], [2, 3, 2])
    interval = cluster_ratio_difference(table, table, np.random.default_rng(0))
    assert (interval.value, interval.low, interval.high, interval.count) == (0.0, 0.0, 0.0, 3)
    interval = cluster_ratio_difference(([3, 3], [4, 4]), ([1, 1], [4, 4]), np.random.default_rng(0))
    assert (interval.value, interval.low, interval.high, interval.count) == (0.5, 0.5, 0.5, 2)


@pytest.mark.parametrize(("events", "low", "high"), [(0, 0.0, 2.7055 / 5.7055), (1, 3 / 5.7055, 1.0)])
def test_a_share_of_0_or_1_in_few_states_is_not_certainty(events: int, low: float, high: float) -> None:
    """Wilson's bounds of 0 of 3 and 3 of 3 at 90%: z^2 / (n + z^2) and n / (n + z^2) with z = 1.645."""
    trials = np.array([4, 5, 0, 6])
    interval = cluster_ratio(events * trials, trials, np.random.default_rng(0))
    assert (interval.value, interval.count) == (events, 3)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-3)


def test_a_difference_of_shares_of_0_or_1_is_not_certainty() -> None:
    none, all_ = ([0, 0], [4, 5]), ([4, 5], [4, 5])
    same = cluster_ratio_difference(none, none, np.random.default_rng(0))
    assert (same.value, same.count) == (0.0, 2)
    assert (same.low, same.high) == pytest.approx((-2.7055 / 4.7055, 2.7055 / 4.7055), abs=1e-3)
    apart = cluster_ratio_difference(all_, none, np.random.default_rng(0))
    assert (apart.value, apart.high) == (1.0, 1.0)
    assert apart.low == pytest.approx(1 - np.sqrt(2) * 2.7055 / 4.7055, abs=1e-3)


def test_a_difference_counts_the_states_with_a_denominator_on_both_sides() -> None:
    interval = cluster_ratio_difference(([1, 1, 1], [2, 2, 2]), ([1, 0, 0], [4, 0, 0]), np.random.default_rng(0))
    assert interval.count == 1


@pytest.mark.parametrize(
    ("numerators", "denominators", "message"),
    [
        ([0, 0], [0, 0], "sum above 0"),
        ([-1, 2], [1, 1], "at least 0"),
        ([1], [1, 1], "expected 2 states"),
        ([np.nan, 0], [1, 1], "finite"),
        ([2], [1], "at most the denominators"),
        ([], [], "non-empty"),
    ],
)
def test_cluster_ratio_refuses_what_has_no_ratio(
    numerators: list[float], denominators: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cluster_ratio(numerators, denominators, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("predictions", "targets", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], 1.0),
        ([2, 2, 2], [1, 2, 3], 0.0),
        ([11, 12, 13], [1, 2, 3], 1.0),  # a constant offset is no variance
        ([3, 2, 1], [1, 2, 3], -3.0),
    ],
)
def test_explained_variance(predictions: list[float], targets: list[float], expected: float) -> None:
    assert explained_variance(predictions, targets) == pytest.approx(expected)


def test_explained_variance_of_constant_targets_is_nan() -> None:
    assert np.isnan(explained_variance([0.1, 0.2], [1.0, 1.0]))


def test_non_finite_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        explained_variance([np.nan, 0.0], [1.0, 0.0])


@pytest.mark.parametrize(
    ("table", "between"),
    [
        ([[1, 1], [0, 0], [1, 1], [0, 0]], 1.0),  # the state decides all
        ([[1, 0], [0, 1], [1, 0], [0, 1]], 0.0),  # the noise decides all
        # means 1, 0, .5, .5: MSB = 2 * (1/6) = 1/3, MSW = 1/4, between = 1/24, total = 7/24
        ([[1, 1], [0, 0], [1, 0], [0, 1]], 1 / 7),
    ],
)
def test_variance_shares(table: list[list[int]], between: float) -> None:
    shares = variance_shares(table)
    assert shares.between_states == pytest.approx(between)
    assert shares.between_states + shares.within_states == pytest.approx(1.0)
