"""Recorded actions in a served target: long replies are streamed, one episode's error stays its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from services.trainer import action_runs, open_loop
from services.trainer.open_loop import (
    Clip,
    InterruptedRunError,
    PairedRuns,
    RecordedTarget,
    ServedTarget,
    read_clips,
)
from tests.worldserve.serving.conftest import KNOWN_STATE, StubBackend, StubScorer, chunk, frame
from worldserve.client import EnvironmentClient, RewardClient
from worldserve.episodes import Episode
from worldserve.messages import ItemError
from worldserve.serving import RunningServer, ServerSettings, start_environment_server, start_reward_server


def episode(seed: int, state: str = KNOWN_STATE, frames: np.ndarray | None = None) -> Episode:
    actions = np.concatenate([chunk(0.1)] * 4)
    return Episode(
        episode_id=f"recorded/{seed}",
        initial_state_id=state,
        seed=seed,
        instruction="lift it",
        requested_actions=actions,
        executed_actions=actions,
        proprioception=np.concatenate([actions[:1], actions]),
        rewards=np.zeros(200, np.float32),
        success=False,
        frame_source=frames,
    )


@pytest.fixture
def reward_server() -> Iterator[RunningServer]:
    running = start_reward_server(StubScorer(), ServerSettings())
    yield running
    running.stop(0)


def served(server: RunningServer) -> tuple[EnvironmentClient, ServedTarget]:
    client = EnvironmentClient(server.address, timeout_s=20)
    return client, ServedTarget(client, client.get_contract())


@pytest.mark.parametrize("inline_bytes", [16 * 2**20, 1000])
def test_all_frames_come_in_order_in_replies_or_as_a_stream(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    monkeypatch.setattr(action_runs, "INLINE_FRAME_BYTES", inline_bytes)
    client, target = served(server)
    with client:
        clips = target.run([episode(3), episode(8)])
        assert client.info().live == 0
    for seed, clip in zip((3, 8), clips):
        assert isinstance(clip, Clip)
        np.testing.assert_array_equal(clip.frames, np.stack([frame(seed, index) for index in range(201)]))
        assert clip.success is True


def test_an_episode_that_cannot_be_opened_leaves_the_others_alone(server: RunningServer) -> None:
    client, target = served(server)
    with client:
        first, broken, last = target.run([episode(1), episode(2, "adjust_bottle/train/0099"), episode(3)])
    assert isinstance(first, Clip)
    assert isinstance(last, Clip)
    assert isinstance(broken, ItemError)
    assert "adjust_bottle/train/0099" in broken.got


def test_an_episode_that_breaks_under_way_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_loop, "unique_run_name", lambda job: "run")
    backend = StubBackend(broken={"run/0"})
    server = start_environment_server(backend, None, ServerSettings())
    try:
        client, target = served(server)
        with client:
            broken, whole = target.run([episode(1), episode(2)])
            assert client.info().live == 0
    finally:
        server.stop(0)
    assert isinstance(broken, ItemError)
    assert isinstance(whole, Clip)
    assert [run for run in backend.runs if run[0] == "run/1"] == [("run/1", n) for n in range(4)]


def test_a_stopped_target_runs_nothing_more(server: RunningServer) -> None:
    client, target = served(server)
    with client:
        target.stop()
        with pytest.raises(InterruptedRunError):
            target.run([episode(1)])


def test_pairs_come_batch_by_batch_and_an_error_of_either_side_is_the_pair_s() -> None:
    frames = np.zeros((201, 8, 8, 3), np.uint8)
    whole, bare = [episode(n, frames=frames + n) for n in range(3)], episode(3)
    with PairedRuns(RecordedTarget(), RecordedTarget()) as runs:
        drawn = list(runs.over([whole[:2], [whole[2], bare]]))
    assert [[e.seed for e in batch] for batch, _ in drawn] == [[0, 1], [2, 3]]
    [[first, second], [third, missing]] = [pairs for _, pairs in drawn]
    assert [pair.target.frames[0, 0, 0, 0] for pair in (first, second, third)] == [0, 1, 2]
    assert isinstance(missing, ItemError)
    assert missing.name.startswith("reference: ")


def test_the_reward_reads_the_frames_of_the_contract_and_no_others(
    server: RunningServer, reward_server: RunningServer
) -> None:
    with EnvironmentClient(server.address) as client, RewardClient(reward_server.address) as reward:
        interface = client.get_contract().interface
        # Frames 0 to 50 would be read as success, but no verdict reads them.
        frames = np.stack([np.full((96, 128, 3), 240 if k <= 50 else k // 2, np.uint8) for k in range(201)])
        reading, short = read_clips(reward, [frames, frames[:100]], interface)
    assert not isinstance(reading, ItemError)
    np.testing.assert_array_equal(reading.frame_indices, np.arange(51, 201))
    np.testing.assert_allclose(reading.probabilities, np.array([k // 2 for k in range(51, 201)]) / 250, rtol=1e-6)
    assert reading.verdict.success is False
    assert reading.verdict.peak == pytest.approx(0.4)
    assert isinstance(short, ItemError)
