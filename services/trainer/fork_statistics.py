"""Rates of forks and mismatches over initial states, as JSON takes them: None where no episode of the kind was seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from services.trainer.statistics import cluster_ratio, cluster_ratio_difference

Counts = Mapping[str, Sequence[float]]
"""By initial state: a numerator and a denominator."""


def summed(entries: Iterable[tuple[str, float, float]]) -> dict[str, tuple[float, float]]:
    """Adds up entries (initial state, numerator, denominator) by state."""
    table: dict[str, tuple[float, float]] = {}
    for state, above, below in entries:
        before = table.get(state, (0.0, 0.0))
        table[state] = (before[0] + above, before[1] + below)
    return table


def rate(counts: Counts, confidence: float, seed: int) -> dict[str, Any] | None:
    """Ratio of sums with its interval over states, as `Interval.as_dict`; None where the denominators are all 0."""
    above, below = _columns(counts, sorted(counts))
    if not below.sum():
        return None
    return cluster_ratio(above, below, np.random.default_rng(seed), confidence).as_dict()


def excess(first: Counts, second: Counts, confidence: float, seed: int) -> dict[str, Any] | None:
    """Rate of `first` minus rate of `second`, both on the same draw of states; None where either is undefined.

    A state that only one of them knows counts as without episodes in the other.
    """
    states = sorted({*first, *second})
    one, other = _columns(first, states), _columns(second, states)
    if not (one[1].sum() and other[1].sum()):
        return None
    return cluster_ratio_difference(
        (one[0], one[1]), (other[0], other[1]), np.random.default_rng(seed), confidence
    ).as_dict()


def _columns(counts: Counts, states: Sequence[str]) -> np.ndarray:
    return np.array([counts.get(state, (0.0, 0.0)) for state in states], np.float64).reshape(-1, 2).T
