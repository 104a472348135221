"""Data sets mixed at a stated ratio."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from services.wm_server.mixing import _Rows, check_data_weights, check_failure_fraction, mixed_probabilities

DIRECTORIES = {"base": 0, "won": 1, "lost": 1}
# Directory 0 holds successes alone; directory 1 two successes and one failure. Two start frames everywhere.
ROWS = [
    {"episode_id": name, "t": t, "success": name != "lost", "mirrored": False}
    for name in ("base", "base", "base", "won", "won", "lost")
    for t in (0, 50)
]


def shares(weights: tuple[float, ...], failure_fraction: float | None) -> dict[str, float]:
    windows = _Rows(ROWS)
    windows._where = [(0, number) for number in range(len(ROWS))]
    found = mixed_probabilities(windows, {0: 0.2, 50: 0.8}, failure_fraction, DIRECTORIES, weights)
    assert found.sum() == pytest.approx(1.0)
    starts = np.array([row["t"] for row in ROWS])
    assert found[starts == 50].sum() == pytest.approx(0.8)
    names = np.array([row["episode_id"] for row in ROWS])
    return {name: float(found[names == name].sum()) for name in DIRECTORIES}


@pytest.mark.parametrize(
    ("weights", "failure_fraction", "expected"),
    [
        ((), None, {"base": 3 / 6, "won": 2 / 6, "lost": 1 / 6}),
        ((), 0.5, {"base": 3 / 10, "won": 2 / 10, "lost": 5 / 10}),
        ((1.0, 3.0), None, {"base": 0.25, "won": 0.5, "lost": 0.25}),
        ((1.0, 3.0), 0.8, {"base": 0.25, "won": 0.15, "lost": 0.6}),
        ((0.0, 2.0), 0.5, {"base": 0.0, "won": 0.5, "lost": 0.5}),
    ],
)
def test_shares(weights: tuple[float, ...], failure_fraction: float | None, expected: dict[str, float]) -> None:
    assert shares(weights, failure_fraction) == pytest.approx(expected)


def test_a_weight_without_windows_is_refused() -> None:
    windows = _Rows(ROWS)
    windows._where = [(0, number) for number in range(len(ROWS))]
    with pytest.raises(ValueError, match=r"directory 3, whose weight is 1\.0"):
        mixed_probabilities(windows, {0: 0.2, 50: 0.8}, None, DIRECTORIES, (1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0,), "each of the 2 .* got 1"),
        ((0.0, 0.0), "one of them above 0"),
        ((-1.0, 1.0), ">= 0"),
        ((1.0, float("nan")), ">= 0"),
    ],
)
def test_senseless_weights_are_refused(weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_data_weights(weights, ["a", "b"])  # type: ignore[list-item]


def rows_of(*kinds: bool | None) -> _Rows:
    windows = _Rows([{"episode_id": f"e{n}", "t": 50, "success": kind} for n, kind in enumerate(kinds)])
    windows._where = [(0, number) for number in range(len(kinds))]
    return windows


@pytest.mark.parametrize(
    ("fraction", "success_starts", "expected"),
    [(0.0, 50, [0.0, 1.0, 0.0]), (1.0, 50, [1.0, 0.0, 0.0]), (0.0, 0, [0.0, 1.0, 0.0]), (1.0, 0, [0.5, 0.0, 0.5])],
)
def test_a_kind_without_a_share_is_never_drawn(fraction: float, success_starts: int, expected: list[float]) -> None:
    """Also at a start frame where it is alone: frame 50 of two failures, one success elsewhere or there."""
    windows = rows_of(False, True, False)
    windows.rows[1]["t"] = success_starts
    if success_starts == 50:
        windows.rows[2]["t"] = 100  # without a start share
    found = windows.probabilities({0: 0.5, 50: 0.5}, fraction)
    assert found.tolist() == pytest.approx(expected)
    assert (found[np.array(expected) == 0.0] == 0.0).all()


@pytest.mark.parametrize(("fraction", "kind", "said"), [(0.0, False, "failures"), (1.0, True, "successes")])
def test_data_of_the_kind_without_a_share_are_refused(fraction: float, kind: bool, said: str) -> None:
    with pytest.raises(ValueError, match=f"failure_fraction: .* at {fraction}; got {said} alone"):
        rows_of(kind, kind).probabilities({50: 1.0}, fraction)
    windows = rows_of(not kind, kind)
    directories = {"e0": 0, "e1": 1}
    with pytest.raises(ValueError, match=rf"directory 2, whose weight is 3\.0: failure_fraction: .* got {said} alone"):
        mixed_probabilities(windows, {50: 1.0}, fraction, directories, (1.0, 3.0))
    assert mixed_probabilities(windows, {50: 1.0}, fraction, directories, (1.0, 0.0)).tolist() == [1.0, 0.0]
    assert mixed_probabilities(windows, {50: 1.0}, 0.5, directories, (1.0, 3.0)).tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    ("outcomes", "fraction", "weights", "refused"),
    [
        ([True, True], 0.5, (), ""),  # one kind is taken as it comes
        ([True, False], 1.0, (), ""),
        ([True, True], 1.0, (), "expected failures among the training episodes, .* got successes alone"),
        ([False, False], 0.0, (), "expected successes among the training episodes, .* got failures alone"),
        ([True, False], 1.0, (1.0, 1.0), "expected failures .* in --data directory 1, "),
        ([True, False], 1.0, (0.0, 1.0), ""),
        ([True, None], 0.0, (), ""),  # unknown outcomes are drawn as successes are
    ],
)
def test_a_kind_that_is_not_there_is_refused_early(outcomes, fraction, weights, refused: str) -> None:
    episodes = SimpleNamespace(infos=[SimpleNamespace(episode_id=str(i), success=s) for i, s in enumerate(outcomes)])
    place = {str(number): number for number in range(len(outcomes))}
    expected = pytest.raises(ValueError, match=refused) if refused else nullcontext()
    with expected:
        check_failure_fraction(fraction, episodes, lambda: place, weights)  # type: ignore[arg-type]
