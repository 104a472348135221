"""Statistics of success rates over initial states: intervals, paired differences, variance shares.

The unit of resampling is the initial state, never the episode: episodes of one state share its difficulty, so a
bootstrap over episodes would claim too much (cluster bootstrap; Cameron, Gelbach and Miller 2008, section II).
Every random draw comes from a generator that the caller hands in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

DEFAULT_CONFIDENCE = 0.90
DEFAULT_RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A point estimate with its two-sided interval at `confidence`; `count` independent units stand behind it."""

    value: float
    low: float
    high: float
    count: int
    confidence: float

    def as_dict(self) -> dict[str, float | int]:
        """The fields, for JSON."""
        return asdict(self)


def _finite(values: ArrayLike, name: str, dimensions: int) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != dimensions or array.size == 0:
        raise ValueError(f"{name}: expected a non-empty array of {dimensions} dimension(s); got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: expected finite numbers; got {int((~np.isfinite(array)).sum())} that are not")
    return array


def _check_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence: expected a number between 0 and 1; got {confidence}")


def wilson_interval(successes: int, count: int, confidence: float = DEFAULT_CONFIDENCE) -> Interval:
    """Wilson's score interval of a proportion of independent trials (Wilson 1927)."""
    from scipy.stats import norm

    _check_confidence(confidence)
    if not 0 <= successes <= count or count == 0:
        raise ValueError(f"successes, count: expected 0 <= successes <= count and count >= 1; got {successes}, {count}")
    z = float(norm.ppf(0.5 + confidence / 2.0))
    share = successes / count
    denominator = 1.0 + z * z / count
    centre = (share + z * z / (2.0 * count)) / denominator
    half = z * np.sqrt(share * (1.0 - share) / count + z * z / (4.0 * count * count)) / denominator
    low = 0.0 if successes == 0 else float(centre - half)
    high = 1.0 if successes == count else float(centre + half)
    return Interval(share, low, high, count, confidence)


def cluster_interval(
    per_state: Sequence[ArrayLike],
    generator: np.random.Generator,
    confidence: float = DEFAULT_CONFIDENCE,
    resamples: int = DEFAULT_RESAMPLES,
) -> Interval:
    """Mean over states of each state's mean, with a percentile bootstrap over states.

    `per_state[i]` holds the outcomes (any number, in [0, 1] for successes) of state i.
    """
    means = np.array([_finite(outcomes, "per_state", 1).mean() for outcomes in per_state])
    return _bootstrap_mean(means, generator, confidence, resamples)


def paired_bootstrap(
    treated: Mapping[str, ArrayLike],
    reference: Mapping[str, ArrayLike],
    generator: np.random.Generator,
    confidence: float = DEFAULT_CONFIDENCE,
    resamples: int = DEFAULT_RESAMPLES,
) -> Interval:
    """Mean over states of (treated mean - reference mean), with a percentile bootstrap over states.

    Both map a state's id to its outcomes; they must name the same states. The states are resampled as pairs, so what
    makes a state easy or hard for both cancels. The result does not depend on the order of the mappings.
    """
    if set(treated) != set(reference):
        only_treated, only_reference = sorted(set(treated) - set(reference)), sorted(set(reference) - set(treated))
        raise ValueError(
            "paired_bootstrap: expected the same initial states on both sides; "
            f"only treated: {only_treated[:3]} ({len(only_treated)}), only reference: {only_reference[:3]} "
            f"({len(only_reference)}). Evaluate both on the same set."
        )
    differences = np.array(
        [
            _finite(treated[state], f"treated[{state}]", 1).mean()
            - _finite(reference[state], f"reference[{state}]", 1).mean()
            for state in sorted(treated)
        ]
    )
    return _bootstrap_mean(differences, generator, confidence, resamples)


def _bootstrap_mean(
    values: NDArray[np.float64], generator: np.random.Generator, confidence: float, resamples: int
) -> Interval:
    _check_confidence(confidence)
    values = _finite(values, "values", 1)
    if resamples < 100:
        raise ValueError(f"resamples: expected at least 100; got {resamples}")
    # Multinomial counts are the bootstrap of a mean without a (resamples, states) array of indices.
    weights = generator.multinomial(len(values), np.full(len(values), 1.0 / len(values)), size=resamples)
    means = weights @ values / len(values)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Interval(float(values.mean()), float(low), float(high), len(values), confidence)


def cluster_ratio(
    numerators: ArrayLike,
    denominators: ArrayLike,
    generator: np.random.Generator,
    confidence: float = DEFAULT_CONFIDENCE,
    resamples: int = DEFAULT_RESAMPLES,
) -> Interval:
    """Sum of `numerators` over sum of `denominators`, with a percentile bootstrap over states.

    Entry i of each is state i's: for fake success, its failures read as success and its failures. States of many
    episodes weigh more than in `cluster_interval`. `count` is the number of states with a denominator above 0. Where
    few states have one, resamples without any are left out. A share of exactly 0 or 1 has no spread to resample, though
    few states cannot show that it is exactly that: its interval reaches to Wilson's bound over `count` states.

    Raises:
        ValueError: for denominators that sum to 0, numbers that are negative or not finite, or numerators above their
            denominators.
    """
    parts = _ratio_parts(numerators, denominators)
    sums = _resampled_sums(parts, generator, confidence, resamples)
    count = int((parts[:, 1] > 0).sum())
    found = _percentiles(_ratios(parts.sum(axis=0))[0], _ratios(sums)[:, 0], count, confidence)
    below, above = _unseen(parts, confidence)
    return replace(found, low=found.low - below, high=found.high + above)


def cluster_ratio_difference(
    first: tuple[ArrayLike, ArrayLike],
    second: tuple[ArrayLike, ArrayLike],
    generator: np.random.Generator,
    confidence: float = DEFAULT_CONFIDENCE,
    resamples: int = DEFAULT_RESAMPLES,
) -> Interval:
    """Ratio of sums `first` minus ratio of sums `second`, each (numerators, denominators) of the same states.

    Both are taken from the same resampled states, as `cluster_ratio` takes one. `count` is the number of states with a
    denominator on both sides; the others still count in their side's ratio. What resampling cannot see of a share of 0
    or 1 (see `cluster_ratio`) is added to the interval as the root of the squares (Newcombe 1998, method 10).
    """
    one, other = _ratio_parts(*first), _ratio_parts(*second)
    if len(one) != len(other):
        raise ValueError(f"second: expected {len(one)} states as in first; got {len(other)}")
    parts = np.concatenate([one, other], axis=1)
    value = _ratios(parts.sum(axis=0))
    resampled = _ratios(_resampled_sums(parts, generator, confidence, resamples))
    count = int(((one[:, 1] > 0) & (other[:, 1] > 0)).sum())
    found = _percentiles(value[0] - value[1], resampled[:, 0] - resampled[:, 1], count, confidence)
    (one_below, one_above), (other_below, other_above) = _unseen(one, confidence), _unseen(other, confidence)
    low, high = found.low, found.high
    if one_below or other_above:
        low = found.value - math.hypot(found.value - low, one_below, other_above)
    if one_above or other_below:
        high = found.value + math.hypot(high - found.value, one_above, other_below)
    return replace(found, low=max(low, -1.0), high=min(high, 1.0))


def _unseen(parts: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """How far below and above a share (states, 2) of exactly 0 or 1 may lie; 0 and 0 for all others."""
    above, below = parts.sum(axis=0)
    if 0 < above < below:
        return 0.0, 0.0
    states = int((parts[:, 1] > 0).sum())
    bound = wilson_interval(states if above else 0, states, confidence)
    return bound.value - bound.low, bound.high - bound.value


def _ratio_parts(numerators: ArrayLike, denominators: ArrayLike) -> NDArray[np.float64]:
    """float64 (states, 2)."""
    above, below = _finite(numerators, "numerators", 1), _finite(denominators, "denominators", 1)
    if above.shape != below.shape:
        raise ValueError(f"numerators: expected {below.size} states as in denominators; got {above.size}")
    if above.min() < 0 or below.min() < 0 or not below.sum() > 0:
        raise ValueError("numerators, denominators: expected numbers of at least 0, denominators with a sum above 0")
    if (above > below).any():
        raise ValueError("numerators: expected shares, at most the denominators; got some above")
    return np.stack([above, below], axis=1)


def _resampled_sums(
    parts: NDArray[np.float64], generator: np.random.Generator, confidence: float, resamples: int
) -> NDArray[np.float64]:
    """Sums (resamples, columns) of `parts` (states, columns) over as many states drawn with replacement."""
    _check_confidence(confidence)
    if resamples < 100:
        raise ValueError(f"resamples: expected at least 100; got {resamples}")
    states = len(parts)
    return generator.multinomial(states, np.full(states, 1.0 / states), size=resamples) @ parts


def _ratios(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """(..., 2 k) numerators and denominators by turns as (..., k); NaN where there is no denominator."""
    above, below = sums[..., ::2], sums[..., 1::2]
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)


def _percentiles(value: float, resampled: NDArray[np.float64], count: int, confidence: float) -> Interval:
    defined = resampled[np.isfinite(resampled)]
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(defined, [tail, 1.0 - tail])
    return Interval(float(value), float(low), float(high), count, confidence)


def explained_variance(predictions: ArrayLike, targets: ArrayLike) -> float:
    """1 - Var(targets - predictions) / Var(targets); NaN where the targets do not vary."""
    predicted = _finite(np.ravel(predictions), "predictions", 1)
    target = _finite(np.ravel(targets), "targets", 1)
    if predicted.shape != target.shape:
        raise ValueError(f"predictions: expected {target.size} values as in targets; got {predicted.size}")
    variance = float(target.var())
    return float("nan") if variance == 0.0 else 1.0 - float((target - predicted).var()) / variance


@dataclass(frozen=True)
class VarianceShares:
    """Success variance split into what the state decides and what the policy's noise decides. Shares sum to 1."""

    between_states: float
    within_states: float
    total: float


def variance_shares(outcomes: ArrayLike) -> VarianceShares:
    """One-way random-effects split of outcomes (states, repeats >= 2) by the method of moments.

    between = max(0, (MSB - MSW) / repeats), within = MSW (Searle, Casella and McCulloch 1992, section 3.5): the naive
    variance of state means would count the noise of a few repeats as difficulty.
    """
    table = _finite(outcomes, "outcomes", 2)
    states, repeats = table.shape
    if states < 2 or repeats < 2:
        raise ValueError(f"outcomes: expected at least 2 states and 2 repeats; got {states} and {repeats}")
    means = table.mean(axis=1)
    mean_square_between = repeats * float(means.var(ddof=1))
    mean_square_within = float(((table - means[:, None]) ** 2).sum()) / (states * (repeats - 1))
    between = max(0.0, (mean_square_between - mean_square_within) / repeats)
    total = between + mean_square_within
    if total == 0.0:
        return VarianceShares(0.0, 0.0, 0.0)
    return VarianceShares(between / total, mean_square_within / total, total)
