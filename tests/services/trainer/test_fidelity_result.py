"""Rates from rows, against tables worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from services.trainer.fidelity_result import Rates, consecutive, rates, read_result

STATES = ["a", "a", "b", "b", "b", "c"]


def test_rates_count_episodes_and_states() -> None:
    truth = [False, False, False, True, True, True]
    read = [True, False, False, True, True, False]
    found = rates(truth, read, STATES, 0.9, 0)
    assert found.fake_success is not None and found.recall is not None and found.discrimination is not None
    assert found.fake_success.value == pytest.approx(1 / 3)
    assert found.recall.value == pytest.approx(2 / 3)
    assert found.discrimination.value == pytest.approx(1 / 3)
    # Failures in a and b, successes in b and c: both in b alone.
    assert (found.fake_success.count, found.recall.count, found.discrimination.count) == (2, 2, 1)


def test_no_fake_success_in_few_states_is_not_certainty() -> None:
    found = rates([False, False, False, True, True, True], [False, False, False, True, True, False], STATES, 0.9, 0)
    assert found.fake_success is not None and found.discrimination is not None
    # Wilson's upper bound of 0 of 2 states at 90%: z^2 / (n + z^2) with z = 1.645.
    assert (found.fake_success.value, found.fake_success.low) == (0.0, 0.0)
    assert found.fake_success.high == pytest.approx(2.7055 / 4.7055, abs=1e-3)
    assert found.discrimination.low <= found.discrimination.value - found.fake_success.high


@pytest.mark.parametrize(("truth", "missing"), [([True] * 6, "fake_success"), ([False] * 6, "recall")])
def test_a_rate_without_episodes_is_none_and_so_is_the_discrimination(truth: list[bool], missing: str) -> None:
    found = rates(truth, truth, STATES, 0.9, 0)
    assert getattr(found, missing) is None
    assert found.discrimination is None
    assert Rates.from_mapping(found.as_dict()) == found


def test_the_order_of_episodes_changes_nothing() -> None:
    truth, read = [False, True, False, True, False, True], [True, True, False, False, True, True]
    backwards = rates(truth[::-1], read[::-1], STATES[::-1], 0.9, 0)
    assert rates(truth, read, STATES, 0.9, 0) == backwards


@pytest.mark.parametrize(
    ("probabilities", "frames", "expected"),
    [
        ([0.1, 0.5, 0.2], 1, True),  # the threshold itself counts
        ([0.1, 0.4, 0.2], 1, False),
        ([0.9, 0.1, 0.9, 0.9], 2, True),
        ([0.9, 0.1, 0.9, 0.1, 0.9], 2, False),
        ([0.9, 0.9], 3, False),
        ([0.9, 0.9, 0.9], 3, True),
        ([], 1, False),
    ],
)
def test_frames_in_a_row_above_the_threshold(probabilities: list[float], frames: int, expected: bool) -> None:
    assert consecutive(np.array(probabilities, np.float32), 0.5, frames) is expected


def test_a_directory_without_a_result_says_which_command_makes_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="worldserve fidelity --out"):
        read_result(tmp_path)


@pytest.mark.parametrize("content", [{}, {"failed": [], "counts": {}, "identity": {}, "reference": {}, "target": {}}])
def test_another_file_is_no_result(tmp_path: Path, content: dict[str, object]) -> None:
    (tmp_path / "result.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="expected a result of `worldserve fidelity`"):
        read_result(tmp_path)
