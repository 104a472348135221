"""An environment with a reward server: verdicts, the frames they read, and a reward server that goes away."""

from __future__ import annotations

import numpy as np
import pytest

from tests.worldserve.serving.conftest import KNOWN_STATE, StubBackend, StubScorer, chunk, frame
from worldserve.client import EnvironmentClient, RewardClient
from worldserve.messages import FrameSelection, ItemError, ResetItem, ScoreItem, StepItem
from worldserve.serving import RemoteJudge, RunningServer, ServerSettings, start_environment_server, start_reward_server


def run(client: EnvironmentClient, seed: int) -> list:
    client.reset([ResetItem("a", KNOWN_STATE, seed)])
    return [client.step([StepItem("a", index, chunk())])[0] for index in range(4)]


@pytest.mark.parametrize(
    ("seed", "peak_frame", "peak"),
    [
        # Stub frames hold (7 seed + index) mod 251, so probability rises to 1 at the frame where that is 250.
        (0, 200, 200 / 250),
        (10, 180, 1.0),
        (35, 200, (7 * 35 + 200 - 251) / 250),
    ],
)
def test_the_verdict_is_the_peak_over_frames_51_to_200(
    reward_server: RunningServer, backend: StubBackend, seed: int, peak_frame: int, peak: float
) -> None:
    judge = RemoteJudge(reward_server.address)
    server = start_environment_server(backend, judge, ServerSettings())
    try:
        with EnvironmentClient(server.address) as client:
            replies = run(client, seed)
    finally:
        server.stop(0)
        judge.close()
    assert [reply.verdict for reply in replies[:3]] == [None] * 3
    verdict = replies[3].verdict
    assert verdict is not None
    assert verdict.peak == pytest.approx(peak)
    assert verdict.peak_frame_index == peak_frame
    assert replies[3].rewards[-1] == float(verdict.success) == float(peak >= 0.5)
    assert replies[3].frame_indices.tolist() == [200]  # the judged frames are not sent unasked


def test_a_reward_server_away_commits_nothing_and_runs_nothing_twice(scorer: StubScorer, backend: StubBackend) -> None:
    reward = start_reward_server(scorer, ServerSettings())
    judge = RemoteJudge(reward.address, timeout_s=1.0)
    judge.contract()
    server = start_environment_server(backend, judge, ServerSettings())
    try:
        with EnvironmentClient(server.address) as client:
            client.reset([ResetItem("a", KNOWN_STATE, 0)])
            client.step([StepItem("a", 0, chunk())])
            judge.score([ScoreItem("warm", frame(0, 60)[None], np.array([60], np.int32))])
            reward.stop(0)
            [away] = client.step([StepItem("a", 1, chunk())])
            assert isinstance(away, ItemError)
            assert (away.code, away.reason) == ("UNAVAILABLE", "REWARD_UNAVAILABLE")
            assert away.retry_after_s > 0
            [other] = client.step([StepItem("a", 1, chunk(0.05))])
            assert isinstance(other, ItemError)
            assert other.reason == "CHUNK_COMMITTED_WITH_OTHER_ACTIONS"
            reward = start_reward_server(scorer, ServerSettings(bind=reward.address))
            [reply] = client.step([StepItem("a", 1, chunk())])
            assert not isinstance(reply, ItemError)
            assert reply.elapsed_steps == 100
    finally:
        server.stop(0)
        reward.stop(0)
        judge.close()
    assert backend.runs == [("a", 0), ("a", 1)]


def test_scores_carry_the_peak_and_ignore_frames_out_of_range(reward_server: RunningServer) -> None:
    frames = np.stack([frame(0, index) for index in (50, 51, 120, 201)])
    with RewardClient(reward_server.address) as client:
        first, carried = client.score(
            [
                ScoreItem("a", frames, np.array([50, 51, 120, 201], np.int32)),
                ScoreItem("b", frames[:2], np.array([50, 51], np.int32), carried_peak=0.9, carried_peak_frame_index=77),
            ]
        )
    assert not isinstance(first, ItemError) and not isinstance(carried, ItemError)
    assert first.frame_indices.tolist() == [51, 120]
    np.testing.assert_allclose(first.probabilities, [51 / 250, 120 / 250])
    assert (first.verdict.peak_frame_index, first.verdict.success) == (120, False)
    assert (carried.verdict.peak, carried.verdict.peak_frame_index, carried.verdict.success) == (0.9, 77, True)


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (ScoreItem("a", np.zeros((1, 48, 64, 3), np.uint8), np.array([60], np.int32)), "WRONG_SHAPE"),
        (ScoreItem("a", np.zeros((2, 96, 128, 3), np.uint8), np.array([60], np.int32)), "WRONG_SHAPE"),
        (ScoreItem("a", frame(0, 60)[None], np.array([60], np.int32), carried_peak=float("nan")), "CARRIED_PEAK"),
    ],
)
def test_a_bad_clip_fails_alone(reward_server: RunningServer, item: ScoreItem, reason: str) -> None:
    with RewardClient(reward_server.address) as client:
        good, bad = client.score([ScoreItem("good", frame(0, 60)[None], np.array([60], np.int32)), item])
    assert not isinstance(good, ItemError)
    assert isinstance(bad, ItemError)
    assert (bad.code, bad.reason) == ("INVALID_ARGUMENT", reason)


def test_a_probability_that_is_not_a_number_is_an_error(reward_server: RunningServer, scorer: StubScorer) -> None:
    scorer.broken = True
    with RewardClient(reward_server.address) as client:
        [bad] = client.score([ScoreItem("a", frame(0, 60)[None], np.array([60], np.int32))])
    assert isinstance(bad, ItemError)
    assert (bad.code, bad.reason) == ("DATA_LOSS", "NON_FINITE_OUTPUT")


def test_frames_between_decisions_come_when_asked_for(reward_server: RunningServer, backend: StubBackend) -> None:
    judge = RemoteJudge(reward_server.address)
    server = start_environment_server(backend, judge, ServerSettings())
    try:
        with EnvironmentClient(server.address) as client:
            client.reset([ResetItem("a", KNOWN_STATE, 0)])
            client.step([StepItem("a", 0, chunk())])
            [reply] = client.step([StepItem("a", 1, chunk(), FrameSelection.every(25))])
    finally:
        server.stop(0)
        judge.close()
    assert not isinstance(reply, ItemError)
    assert reply.frame_indices.tolist() == [75, 100]
    np.testing.assert_array_equal(reply.frames[0], frame(0, 75))
