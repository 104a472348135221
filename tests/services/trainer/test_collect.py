"""Recorded rollouts: whole episodes over a real socket, into the store, resumable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.trainer.collect import CollectConfig, missing_plans, run
from services.trainer.policies import FlowPolicy, flow_mini, save_policy
from tests.worldserve.serving.conftest import KNOWN_STATE, StubBackend, frame
from worldserve.episodes import EpisodeReader, SealedStateError
from worldserve.serving import RunningServer, ServerSettings, start_environment_server

ROOT = Path(__file__).parents[3]


@pytest.fixture
def server() -> Iterator[RunningServer]:
    running = start_environment_server(StubBackend(), None, ServerSettings())
    yield running
    running.stop(0)


def config(server: RunningServer, directory: Path, **changes: object) -> CollectConfig:
    save_policy(FlowPolicy(flow_mini(), 0), directory / "policy", {})
    settings: dict[str, object] = {
        "policy": directory / "policy",
        "out": directory / "rollouts",
        "target": server.address,
        "episodes": 1,
        "initial_states": ROOT / "initial_states" / "train",
    }
    return CollectConfig(**(settings | changes))  # type: ignore[arg-type]


def test_an_episode_is_recorded_whole_and_only_once(server: RunningServer, tmp_path: Path) -> None:
    settings = config(server, tmp_path)
    assert run(settings)[:2] == (1, 1)
    [episode] = EpisodeReader(settings.out)
    assert episode.initial_state_id == KNOWN_STATE
    assert (episode.end_reason, episode.terminated, episode.truncated) == ("limit", True, False)
    assert episode.frames.shape == (201, 96, 128, 3)
    np.testing.assert_array_equal(episode.frames_at([200])[0], frame(episode.seed, 200))
    # Commanded: the state after the reset, then each executed target.
    assert episode.proprioception.shape == (201, 14)
    np.testing.assert_array_equal(episode.proprioception[1:], episode.executed_actions)
    assert episode.requested_actions.shape == (200, 14)
    assert episode.contract is not None and episode.contract.provenance.backend == "stub"
    assert run(settings)[:2] == (0, 1)
    assert missing_plans(settings, [KNOWN_STATE]) == []


def test_sealed_test_states_are_refused(server: RunningServer, tmp_path: Path) -> None:
    with pytest.raises(SealedStateError):
        run(config(server, tmp_path, initial_states=ROOT / "initial_states" / "test"))


@pytest.mark.parametrize("changes", [{"episodes": 0}, {"batch": 0}, {"first_state": -1}])
def test_settings_that_collect_nothing_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        CollectConfig(**changes)  # type: ignore[arg-type]
