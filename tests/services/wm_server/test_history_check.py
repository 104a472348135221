"""The history check: 0 for a model that ignores its history, large for one whose history decides."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.wm_server import history_check
from services.wm_server.history_check import HistoryCheckConfig, check, difference, main, moving_arm, partners
from services.wm_server.outcomes import Outcome
from tests.services.wm_server.conftest import make_episode, make_model
from tests.worldserve.serving.conftest import StubScorer
from worldserve.client import RewardClient
from worldserve.contract import adjust_bottle
from worldserve.episodes import Episode, EpisodeWriter
from worldserve.serving import ServerSettings, start_reward_server

STATES = [f"adjust_bottle/train/{number:04d}" for number in range(6)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = start_reward_server(StubScorer(), ServerSettings())
    yield server.address
    server.stop(0)


def episode(number: int, success: bool, left: bool = False) -> Episode:
    """A bright history for a success, a dark one for a failure; frames before it are grey."""
    made = make_episode(number, success)
    frames = np.full((201, 96, 128, 3), 100, np.uint8)
    frames[43:] = 200 if success else 20
    actions = made.executed_actions.copy()
    if left:
        actions[:, [0, 7]] = actions[:, [7, 0]]
    return dataclasses.replace(made, frame_source=frames, requested_actions=actions, executed_actions=actions)


def test_the_arm_is_the_one_that_moves() -> None:
    assert (moving_arm(episode(0, True)), moving_arm(episode(0, True, left=True))) == ("right", "left")


def test_partners_share_the_arm_and_never_the_state() -> None:
    arms = ["left", "right"] * 3
    states = [STATES[0], STATES[0], *STATES[2:]]
    for seed in range(10):
        same, any_episode = (partners(states, kind, np.random.default_rng(seed)) for kind in (arms, None))
        assert all(arms[source] == arm for source, arm in zip(same, arms))
        assert all(states[source] != state for found in (same, any_episode) for source, state in zip(found, states))
    with pytest.raises(ValueError, match="left arm moves"):
        partners(STATES[:3], ["left", "right", "right"], np.random.default_rng(0))


def row(number: int, success: bool, verdict: bool) -> Outcome:
    return Outcome(f"e{number}", STATES[number % 6], success, verdict, 0.5)


def test_difference_is_of_balanced_accuracies_and_its_interval_over_states() -> None:
    truth = [number % 2 == 0 for number in range(12)]
    right = [row(number, success, success) for number, success in enumerate(truth)]
    optimist = [row(number, success, True) for number, success in enumerate(truth)]
    found = difference(right, optimist, np.random.default_rng(0))
    assert found == {"value": 0.5, "low": 0.5, "high": 0.5, "count": 6, "confidence": 0.90}
    none = difference(right, right, np.random.default_rng(0))
    assert (none["value"], none["low"], none["high"]) == (0.0, 0.0, 0.0)
    half = [row(number, success, success or number > 5) for number, success in enumerate(truth)]
    found = difference(right, half, np.random.default_rng(0))
    assert found["value"] == pytest.approx(0.25)
    assert found["low"] <= found["value"] <= found["high"]
    with pytest.raises(ValueError, match="one kind"):
        difference(right[::2], right[::2], np.random.default_rng(0))


@pytest.mark.parametrize(("reads_history", "value"), [(True, 1.0), (False, 0.0)])
def test_a_model_that_ignores_its_history_has_no_difference(
    address: str, monkeypatch: pytest.MonkeyPatch, reads_history: bool, value: float
) -> None:
    """The model is a rule here: it repeats its history's last frame, or the first frame."""

    def rule(
        model: object, known: dict[int, np.ndarray], poses: object, start: int, seed: int, wanted: range
    ) -> np.ndarray:
        return np.stack([known[start if reads_history else 0]] * len(wanted))

    monkeypatch.setattr(history_check, "predict_rest", rule)
    # The only other episode of the same arm has the other outcome.
    episodes = [episode(0, True), episode(1, False), episode(2, True, left=True), episode(3, False, left=True)]
    with RewardClient(address) as reward:
        result = check(make_model(), episodes, reward)
    assert result["outcome_difference"]["value"] == value
    assert result["true"]["recall"] - result["shuffled_same_arm"]["recall"] == pytest.approx(
        value if reads_history else 0
    )
    assert [row["history_of"] for row in result["shuffled_same_arm"]["rows"]] == [
        "made/1",
        "made/0",
        "made/3",
        "made/2",
    ]


def test_the_command_writes_the_number_with_its_identity(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(latent_height=6, latent_width=8).save(tmp_path / "model", {})
    with EpisodeWriter(tmp_path / "data") as writer:
        for number in range(4):
            writer.append(
                dataclasses.replace(episode(number, number < 2), contract=adjust_bottle("simulator", "made", {}))
            )
    settings = ["--weights", str(tmp_path / "model"), "--data", str(tmp_path / "data"), "--reward", address]
    assert main([*settings, "--out", str(tmp_path / "history.json"), "--episodes", "4"]) == 0
    found = json.loads((tmp_path / "history.json").read_text())
    assert set(found["outcome_difference"]) == {"value", "low", "high", "count", "confidence"}
    sha256 = json.loads((tmp_path / "model" / "config.json").read_text())["sha256"]
    assert found["identity"]["target_weights_sha256"] == sha256
    assert (found["true"]["failures"], found["true"]["successes"]) == (2, 2)
    assert "outcome_difference" in capsys.readouterr().out
    assert main([*settings, "--out", str(tmp_path / "h.json"), "--data", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err


def test_senseless_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="episodes, threads"):
        HistoryCheckConfig(Path("m"), (Path("d"),), "r", Path("o"), episodes=1)
