"""Outcomes: drawn as a server draws them, judged by a real reward server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from services.wm_server import outcomes as module
from services.wm_server.backend import WorldModelBackend
from services.wm_server.dataset import episode_poses
from services.wm_server.episodes import EpisodeSubset
from services.wm_server.measure import last_frames, predict_episode, predict_rest
from services.wm_server.outcomes import (
    Outcome,
    accuracy_of,
    area_of,
    as_json,
    balanced_episodes,
    has_both_outcomes,
    judge,
    judged_frames,
    open_loop,
    open_loop_after,
    outcomes,
    reward_facts,
)
from tests.services.wm_server.conftest import make_episode, make_model
from tests.worldserve.serving.conftest import StubScorer
from worldserve.client import RewardClient
from worldserve.episodes import Episode, InitialState
from worldserve.messages import BackendChunk, BackendStep, ResetItem
from worldserve.serving import ServerSettings, start_reward_server

SIZE = (96, 128, 3)


@pytest.fixture(scope="module")
def reward() -> Iterator[RewardClient]:
    server = start_reward_server(StubScorer(), ServerSettings())
    with RewardClient(server.address) as client:
        yield client
    server.stop(0)


def bright(value: int, success: bool = True, number: int = 0) -> Episode:
    """An episode of which every frame has one grey: the stub reads value / 250."""
    frames = np.full((201, *SIZE), value, np.uint8)
    return dataclasses.replace(make_episode(number, success), frame_source=frames)


def recorded(model: object, episode: Episode, wanted: object) -> np.ndarray:
    return episode.frames_at(list(wanted))  # type: ignore[call-overload]


def test_frames_51_to_200_are_judged() -> None:
    assert (judged_frames()[0], judged_frames()[-1], len(judged_frames())) == (51, 200, 150)


def test_rows_hold_truth_verdict_and_peak(reward: RewardClient) -> None:
    episodes = [bright(200, True, 0), bright(200, False, 1), bright(50, True, 2), bright(50, False, 3)]
    rows = outcomes(make_model(), episodes, reward, recorded)
    assert [(row.success, row.verdict) for row in rows] == [(True, True), (False, True), (True, False), (False, False)]
    assert [row.peak for row in rows] == pytest.approx([0.8, 0.8, 0.2, 0.2])
    assert [row.initial_state_id for row in rows] == [f"adjust_bottle/train/{number:04d}" for number in range(4)]
    found = accuracy_of(rows)
    assert (found.fake_success, found.recall, found.balanced) == (0.5, 0.5, 0.5)


def test_the_peak_is_carried_over_clips(reward: RewardClient, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = np.full((150, *SIZE), 10, np.uint8)
    frames[20] = 240
    whole = judge(reward, "a", frames, judged_frames())
    monkeypatch.setattr(module, "CLIP_BYTES", 7 * frames[0].nbytes)
    assert judge(reward, "a", frames, judged_frames()) == whole
    assert (whole.success, whole.peak_frame_index) == (True, 71)


@pytest.mark.parametrize("draft_width", [0, 8])
def test_episodes_are_drawn_as_a_server_draws_them(draft_width: int) -> None:
    model, episode = make_model(draft_width=draft_width), dataclasses.replace(make_episode(1), seed=2**62 + 5)
    name = episode.initial_state_id
    state = InitialState(
        initial_state_id=name, purpose="train", scene={}, frame=episode.frames_at([0])[0],
        proprioception=episode.proprioception[0], instruction="",
    )  # fmt: skip
    backend = WorldModelBackend(model, {name: state})
    backend.reset([ResetItem("a", name, episode.seed)])
    served = []
    for chunk in range(4):
        numbers = tuple(range(chunk * 50 + 1, chunk * 50 + 51))
        (reply,) = backend.step(
            [BackendStep("a", chunk, chunk * 50, episode.executed_actions[chunk * 50 :][:50], numbers)]
        )
        assert isinstance(reply, BackendChunk)
        served.append(reply.frames)
    np.testing.assert_array_equal(open_loop(model, episode, judged_frames()), np.concatenate(served)[50:])


def test_the_rest_after_the_models_own_history_is_the_open_loop_prediction() -> None:
    model, episode = make_model(), make_episode(0)
    poses = episode_poses(episode, model.pose_format)
    whole = predict_episode(model, episode.frames_at([0])[0], poses, 3)
    known = {number: whole[number] for number in (0, *range(43, 51))}
    np.testing.assert_array_equal(predict_rest(model, known, poses, 50, 3, range(51, 201)), whole[51:])


def test_numbers_that_are_not_finite_are_never_judged(reward: RewardClient) -> None:
    model = make_model()
    model.transformer.wan.proj_out.bias.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="finite latents after frame 0"):
        outcomes(model, [make_episode(0)], reward)


def test_an_episode_without_a_known_success_is_refused(reward: RewardClient) -> None:
    with pytest.raises(ValueError, match=r"made/0.*known success"):
        outcomes(make_model(), [dataclasses.replace(make_episode(0), success=None)], reward)


def test_who_judges_is_named(reward: RewardClient) -> None:
    facts = reward_facts(reward)
    assert len(facts["provenance_fingerprint"]) == 64
    assert isinstance(facts["facts"], dict)


def test_a_reward_server_that_is_away_is_said() -> None:
    with RewardClient("127.0.0.1:1", timeout_s=0.3) as client, pytest.raises(ConnectionError):
        reward_facts(client)


def test_one_kind_alone_divides_by_nothing() -> None:
    found = accuracy_of([Outcome("a", "s", True, True, 0.9)])
    assert (found.failures, found.recall) == (0, 1.0)


def subset(*kinds: bool | None) -> EpisodeSubset:
    infos = [SimpleNamespace(success=kind) for kind in kinds]
    return EpisodeSubset(SimpleNamespace(infos=infos), range(len(kinds)))  # type: ignore[arg-type]


def test_an_unknown_outcome_is_no_failure() -> None:
    assert balanced_episodes(subset(None, True, None, False, True), 9).positions == [3, 1, 4]
    assert balanced_episodes(subset(None, True, None), 9).positions == [1]
    assert has_both_outcomes(subset(None, True, False))
    assert not has_both_outcomes(subset(None, True))
    won, unknown = (SimpleNamespace(success=kind, action_count=0, frames_at=lambda _: [0]) for kind in (True, None))
    frames, success = last_frames([unknown, won])
    assert (len(frames), success.tolist()) == (1, [True])


def test_after_a_frame_the_recorded_ones_come_first() -> None:
    """Drawn after frame 100: up to there the episode's own frames, then what `predict_rest` draws from them."""
    model, episode = make_model(), make_episode(1)
    wanted = [60, 100, 101, 150, 200]
    made = open_loop_after(100)(model, episode, wanted)
    np.testing.assert_array_equal(made[:2], episode.frames_at([60, 100]))
    poses, known = episode_poses(episode, model.pose_format), dict(enumerate(episode.frames))
    drawn = predict_rest(model, {n: known[n] for n in (0, *range(93, 101))}, poses, 100, episode.seed, wanted[2:])
    np.testing.assert_array_equal(made[2:], drawn)
    np.testing.assert_array_equal(open_loop_after(0)(model, episode, wanted), open_loop(model, episode, wanted))


@pytest.mark.parametrize(
    ("successes", "failures", "area"),
    [([0.9, 0.8], [0.1, 0.2], 1.0), ([0.1], [0.9], 0.0), ([0.5, 0.9], [0.5, 0.1], 0.875), ([0.3], [0.3], 0.5)],
)
def test_area_under_the_curve_counts_ordered_pairs(successes: list[float], failures: list[float], area: float) -> None:
    rows = [Outcome("e", "s", True, True, peak) for peak in successes]
    rows += [Outcome("e", "s", False, False, peak) for peak in failures]
    assert area_of(rows) == area


def test_one_kind_alone_has_no_area() -> None:
    rows = [Outcome("e", "s", True, True, 0.5)]
    assert np.isnan(area_of(rows))
    assert "area_under_curve" not in as_json(rows)
