"""The world model behind its server: real sockets, a judge, and bytes that depend on the request alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from services.wm_server.backend import WorldModelBackend
from tests.services.wm_server.conftest import make_model
from tests.worldserve.serving.conftest import StubScorer
from worldserve.client import EnvironmentClient, raise_for_errors
from worldserve.episodes import InitialState
from worldserve.messages import FrameSelection, ReplayItem, ResetItem, StepItem
from worldserve.serving import RemoteJudge, RunningServer, ServerSettings, start_environment_server, start_reward_server

STATES = [f"adjust_bottle/train/{number:04d}" for number in range(2)]


@pytest.fixture(scope="module", params=[0, 8], ids=["plain", "draft"])
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    reward = start_reward_server(StubScorer(), ServerSettings())
    judge = RemoteJudge(reward.address)
    states = {
        name: InitialState(
            initial_state_id=name, purpose="train", scene={}, instruction="lift the bottle",
            frame=np.random.default_rng(number).integers(0, 256, (96, 128, 3)).astype(np.uint8),
            proprioception=np.array([0] * 6 + [1] + [0] * 6 + [1], np.float32),
        )
        for number, name in enumerate(STATES)
    }  # fmt: skip
    backend = WorldModelBackend(make_model(latent_height=6, latent_width=8, draft_width=request.param), states)
    running = start_environment_server(backend, judge, ServerSettings())
    yield running
    running.stop(0)
    judge.close()
    reward.stop(0)
    backend.shutdown()


def actions(number: int) -> np.ndarray:
    """Within the limits and slow, so that nothing is clipped: float32 (200, 14)."""
    targets = np.zeros((200, 14), np.float32)
    targets[:, 7:13] = np.linspace(0, 0.1 * (1 + number), 200)[:, None]
    targets[:, [6, 13]] = 1.0
    return targets


def test_recorded_actions_replay_to_the_same_bytes_and_the_seed_counts(server: RunningServer) -> None:
    items = [ReplayItem(f"r{seed}", STATES[0], seed, actions(0)) for seed in (1, 2, 1)]
    with EnvironmentClient(server.address, timeout_s=120) as client:
        first, other, again = raise_for_errors(outcome for _, outcome in client.replay(items))
        [alone] = raise_for_errors(outcome for _, outcome in client.replay(items[:1]))
    assert first.frames_sha256 == again.frames_sha256 == alone.frames_sha256
    assert first.frames_sha256 != other.frames_sha256
    assert (first.elapsed_steps, first.success, first.clipped_count) == (200, None, 0)
    assert first.verdict == alone.verdict
    assert first.verdict is not None
    assert first.total_reward == float(first.verdict.success)


def test_an_episode_step_by_step_is_its_replay(server: RunningServer) -> None:
    import hashlib

    with EnvironmentClient(server.address, timeout_s=120) as client:
        [opened] = raise_for_errors(client.reset([ResetItem("live", STATES[1], 5)]))
        seen = hashlib.sha256(opened.frame.tobytes())
        for index in range(4):
            item = StepItem("live", index, actions(1)[index * 50 : index * 50 + 50], FrameSelection.every(1))
            [reply] = raise_for_errors(client.step([item]))
            [repeated] = raise_for_errors(client.step([item]))
            np.testing.assert_array_equal(reply.frames, repeated.frames)
            seen.update(reply.frames.tobytes())
        client.close_episodes(["live"])
        [(_, outcome)] = client.replay([ReplayItem("again", STATES[1], 5, actions(1))])
    [replayed] = raise_for_errors([outcome])
    assert replayed.frames_sha256 == seen.hexdigest()
    assert replayed.verdict == reply.verdict
