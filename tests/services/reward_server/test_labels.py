"""Which frames show success."""

import numpy as np
import pytest

from services.reward_server.labels import MARGIN_FRAMES, NEGATIVE, POSITIVE, SURE_FRAMES, UNKNOWN, frame_labels


def test_failures_are_negative_throughout() -> None:
    assert (frame_labels(False, 201, {"first_success_action": None}) == NEGATIVE).all()


def test_a_dated_success_that_is_still_up_is_positive_to_the_end() -> None:
    labels = frame_labels(True, 201, {"first_success_action": 114, "diagnostics": {"success_now": 1.0}})
    assert (labels[: 114 - MARGIN_FRAMES] == NEGATIVE).all()
    assert (labels[114 - MARGIN_FRAMES : 114] == UNKNOWN).all()
    assert (labels[114:] == POSITIVE).all()


def test_a_success_that_slipped_later_is_sure_only_at_first() -> None:
    labels = frame_labels(True, 201, {"first_success_action": 114, "diagnostics": {"success_now": 0.0}})
    assert (labels[114 : 114 + SURE_FRAMES] == POSITIVE).all()
    assert (labels[114 + SURE_FRAMES :] == UNKNOWN).all()


@pytest.mark.parametrize(("flags", "first_unknown"), [([True] * 4, 0), ([False, False, True, True], 101)])
def test_success_known_by_chunk_leaves_the_rest_unknown(flags: list[bool], first_unknown: int) -> None:
    labels = frame_labels(True, 201, {"success_after_chunk": flags})
    boundary = max(first_unknown - MARGIN_FRAMES, 0)
    if first_unknown:
        assert (labels[:boundary] == NEGATIVE).all()
        assert (labels[boundary:] == UNKNOWN).all()
    assert POSITIVE not in labels


def test_without_any_date_only_the_first_quarter_is_sure() -> None:
    labels = frame_labels(True, 201, {})
    assert (labels[:50] == NEGATIVE).all()
    assert (labels[50:] == UNKNOWN).all()


def test_labels_are_of_every_frame() -> None:
    assert frame_labels(True, 7, {"first_success_action": 6, "diagnostics": {"success_now": 1.0}}).dtype == np.int8
