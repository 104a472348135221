"""The threshold: tables by hand, and what must hold of every choice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward_server.threshold import choose_threshold, episode_peaks


def test_lies_in_the_middle_of_the_gap_in_log_odds() -> None:
    chosen = choose_threshold([0.1, 0.2, 0.8, 0.9], [False, False, True, True])
    assert chosen.value == pytest.approx(0.5)
    assert (chosen.fake_success, chosen.recall) == (0.0, 1.0)


def test_allows_the_share_of_failures_that_was_asked_for() -> None:
    peaks = [*np.linspace(0.01, 0.5, 99), 0.95, 0.9, 0.99]
    success = [*[False] * 100, True, True]
    chosen = choose_threshold(peaks, success, max_fake_success=0.03)
    assert chosen.recall == 1.0
    assert chosen.fake_success == pytest.approx(0.01)
    assert 0.5 < chosen.value <= 0.9


def test_gives_up_recall_where_the_failures_ask_for_it() -> None:
    chosen = choose_threshold([0.7, 0.6, 0.9], [False, True, True], max_fake_success=0.03)
    assert (chosen.fake_success, chosen.recall) == (0.0, 0.5)
    assert 0.7 < chosen.value <= 0.9


def test_takes_the_failures_it_need_not_accept_out() -> None:
    """The allowance is not used where it buys no recall."""
    peaks = [0.1] * 98 + [0.6, 0.5] + [0.9]
    chosen = choose_threshold(peaks, [False] * 100 + [True], max_fake_success=0.03)
    assert chosen.fake_success == 0.0
    assert chosen.value > 0.6


def test_refuses_a_classifier_that_does_not_separate() -> None:
    with pytest.raises(ValueError, match="does not separate"):
        choose_threshold([0.9, 0.8, 0.3], [False, False, True])


@pytest.mark.parametrize(
    ("peaks", "success", "match"),
    [
        ([0.1, np.nan], [False, True], "finite"),
        ([0.1, 1.5], [False, True], r"\[0, 1\]"),
        ([0.1, 0.2], [True, True], "successes and failures"),
        ([0.1], [False, True], "peaks"),
    ],
)
def test_refuses_bad_input(peaks: list[float], success: list[bool], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        choose_threshold(peaks, success)


@given(
    st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=2, max_size=60),
    st.floats(0, 0.5),
)
def test_never_more_fake_success_than_allowed_and_no_recall_left_behind(
    rows: list[tuple[float, bool]], allowed: float
) -> None:
    peaks = np.array([peak for peak, _ in rows])
    success = np.array([label for _, label in rows])
    if success.all() or not success.any():
        return
    try:
        chosen = choose_threshold(peaks, success, allowed)
    except ValueError:
        return
    assert chosen.fake_success == (peaks[~success] >= chosen.value).mean() <= allowed + 1e-9
    for other in peaks:  # every threshold that could make a difference
        if (peaks[~success] >= other).mean() <= allowed:
            assert (peaks[success] >= other).mean() <= chosen.recall


def test_peaks_are_over_the_frames_of_an_episode() -> None:
    assert episode_peaks(np.array([[0.1, 0.7, 0.2], [0.3, 0.1, 0.0]], np.float32)).tolist() == pytest.approx([0.7, 0.3])
    with pytest.raises(ValueError, match="frames >= 1"):
        episode_peaks(np.empty((3, 0), np.float32))
