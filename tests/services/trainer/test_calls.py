"""Items that may pass are sent again, alone and after the wait that the target asks for; what cannot pass is raised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.trainer import calls
from services.trainer.calls import MAX_BACKOFF_S, MAX_RETRIES, brief, call_again, retried
from tests.services.trainer.conftest import item_error
from worldserve.client.calling import ServerAwayError, WrongServiceError
from worldserve.messages import ItemError, ItemFailedError


class Target:
    """Answers item n with `answers[n]`, the last of them for good."""

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self.answers = answers
        self.sent: list[list[str]] = []

    def __call__(self, items: list[str]) -> list[Any]:
        self.sent.append(items)
        return [self.answers[item].pop(0) if len(self.answers[item]) > 1 else self.answers[item][0] for item in items]


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were waited, which are not."""
    seconds: list[float] = []
    monkeypatch.setattr(calls.time, "sleep", seconds.append)
    return seconds


def away(retry_after_s: float | None = None) -> ItemError:
    return replace(item_error("UNAVAILABLE"), retry_after_s=retry_after_s)


def test_only_failed_items_are_sent_again_and_replies_keep_their_places(waited: list[float]) -> None:
    target = Target({"a": ["A"], "b": [away(), away(), "B"], "c": [away(), "C"]})
    assert retried(target, ["a", "b", "c"]) == ["A", "B", "C"]
    assert target.sent == [["a", "b", "c"], ["b", "c"], ["b"]]
    assert waited == [0.05, 0.1]


def test_the_longest_wait_that_an_item_asks_for_counts_up_to_a_limit(waited: list[float]) -> None:
    assert retried(Target({"a": [away(0.5), away(60.0), "A"], "b": [away(2.0), "B"]}), ["a", "b"]) == ["A", "B"]
    assert waited == [2.0, MAX_BACKOFF_S]


def test_an_item_that_stays_away_is_returned_as_its_error(waited: list[float]) -> None:
    target = Target({"a": ["A"], "b": [away()]})
    assert retried(target, ["a", "b"]) == ["A", away()]
    assert len(target.sent) == 1 + MAX_RETRIES
    assert len(waited) == MAX_RETRIES


def test_errors_that_cannot_pass_are_raised_together(waited: list[float]) -> None:
    wrong = item_error("FAILED_PRECONDITION")
    target = Target({"a": [away(), wrong], "b": ["B"], "c": [wrong]})
    with pytest.raises(ItemFailedError) as caught:
        retried(target, ["a", "b", "c"])
    assert list(caught.value.errors) == [wrong, wrong]
    assert target.sent == [["a", "b", "c"], ["a"]]


def test_errors_that_cannot_pass_are_answers_beside_the_others(waited: list[float]) -> None:
    wrong, waits = item_error("NOT_FOUND"), []
    target = Target({"fine": ["F"], "slow": [away(), away(), "S"], "no": [wrong]})
    assert call_again(target, ["fine", "slow", "no"], waits.append) == ["F", "S", wrong]
    assert target.sent == [["fine", "slow", "no"], ["slow"], ["slow"]]
    assert (waits, waited) == ([0.05, 0.1], [])


def test_a_failed_call_is_told_by_its_first_item() -> None:
    first, other = item_error("NOT_FOUND"), item_error("ABORTED")
    assert brief(ItemFailedError([first])) == str(first)
    assert brief(ItemFailedError([first, other, other])) == f"{first} (2 more items of the call failed.)"


INTERRUPTED = "interrupted; the same command goes on from here"


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (None, 0, ""),
        (KeyboardInterrupt(), 130, INTERRUPTED),
        (ServerAwayError("HOST:1: no answer in time."), 1, f"HOST:1: no answer in time. {INTERRUPTED}"),
        (WrongServiceError("HOST:1 is no EnvironmentService."), 1, "HOST:1 is no EnvironmentService."),
        (ValueError("out: taken"), 1, "out: taken"),
        (FloatingPointError("loss: nan"), 1, "loss: nan"),
    ],
)
def test_a_job_ends_with_what_may_help(
    capsys: pytest.CaptureFixture[str], raised: BaseException | None, status: int, said: str
) -> None:
    def work() -> int:
        if raised is not None:
            raise raised
        return 0

    assert calls.resumable("job", work) == status
    assert capsys.readouterr().err == (f"worldserve job: {said}\n" if said else "")
