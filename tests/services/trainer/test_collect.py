"""Recorded rollouts: whole episodes over a real socket, into the store, resumable."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from services.trainer import collect
from services.trainer.collect import CollectConfig, main, missing_plans, run
from services.trainer.policies import FlowPolicy, flow_mini, save_policy
from tests.worldserve.serving.conftest import KNOWN_STATE, StubBackend, chunk, frame
from worldserve.client import EnvironmentClient
from worldserve.contract import adjust_bottle
from worldserve.episodes import EpisodeReader, EpisodeWriter, InitialStateSet, SealedStateError
from worldserve.messages import BackendChunk, BackendStep, ItemError, ItemFailedError, ResetItem, StepItem
from worldserve.serving import RunningServer, ServerSettings, start_environment_server

ROOT = Path(__file__).parents[3]


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
    done = run(settings)
    assert (done.added, done.total, done.failures) == (1, 1, ())
    [episode] = EpisodeReader(settings.out)
    assert episode.initial_state_id == KNOWN_STATE
    assert (episode.end_reason, episode.terminated, episode.truncated) == ("limit", True, False)
    assert episode.frames.shape == (201, 96, 128, 3)
    np.testing.assert_array_equal(episode.frames_at([200])[0], frame(episode.seed, 200))
    # Commanded: the state after the reset, then each executed target.
    assert episode.proprioception.shape == (201, 14)
    np.testing.assert_array_equal(episode.proprioception[1:], episode.executed_actions)
    assert episode.requested_actions.shape == (200, 14)
    assert episode.metadata["mode"] == "sample"
    assert episode.metadata["noise_level"] == flow_mini().noise_level
    assert episode.contract is not None and episode.contract.provenance.backend == "stub"
    done = run(settings)
    assert (done.added, done.total) == (0, 1)
    assert missing_plans(settings, [KNOWN_STATE]) == []


def test_sealed_test_states_are_refused(server: RunningServer, tmp_path: Path) -> None:
    with pytest.raises(SealedStateError):
        run(config(server, tmp_path, initial_states=ROOT / "initial_states" / "test"))


def test_measures_may_ask_for_test_states(server: RunningServer, tmp_path: Path) -> None:
    """They reach the server, which here does not know them; none is refused for its purpose."""
    with pytest.raises(ItemFailedError, match="adjust_bottle/test/0000"):
        run(config(server, tmp_path, initial_states=ROOT / "initial_states" / "test", for_measures=True))


@pytest.mark.parametrize(
    ("each", "first", "states"),
    [(1, 0, "abca"), (2, 0, "aabb"), (3, 2, "ccca")],  # after the set's last state comes its first again
)
def test_states_are_taken_in_order_several_times_each_if_asked(each: int, first: int, states: str) -> None:
    settings = CollectConfig(out=Path("nowhere"), episodes=4, episodes_per_state=each, first_state=first)
    plans = collect.planned_episodes(settings, ["a", "b", "c"])
    assert "".join(plan.initial_state_id for plan in plans) == states
    assert len({plan.environment_seed for plan in plans}) == 4  # other noise each time


@pytest.mark.parametrize("changes", [{"episodes": 0}, {"batch": 0}, {"first_state": -1}, {"episodes_per_state": 0}])
def test_settings_that_collect_nothing_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        CollectConfig(**changes)  # type: ignore[arg-type]


def arguments(settings: CollectConfig) -> list[str]:
    """The same on the command line."""
    fields = ("policy", "out", "target", "episodes", "initial_states", "batch")
    return [part for name in fields for part in (f"--{name.replace('_', '-')}", str(getattr(settings, name)))]


def one_state(directory: Path) -> Path:
    """A set of the one state that the stub knows."""
    states = InitialStateSet.load(ROOT / "initial_states" / "train")
    InitialStateSet(states.states[:1]).save(directory / "states")
    return directory / "states"


def test_episodes_that_a_killed_run_left_open_are_not_met(server: RunningServer, tmp_path: Path) -> None:
    """They have the names this collection gave them; the data set keeps those, and the seeds they always had."""
    settings = config(server, tmp_path)
    with EnvironmentClient(server.address, timeout_s=20) as killed:
        killed.reset([ResetItem("rollouts-sample-0/0/0", KNOWN_STATE, 5)])
        killed.step([StepItem("rollouts-sample-0/0/0", 0, chunk())])
        assert run(settings).added == 1
    [episode] = EpisodeReader(settings.out)
    assert (episode.episode_id, episode.seed) == ("rollouts-sample-0/0/0", 2440950710608614359)


def test_two_collections_of_one_name_share_a_server(server: RunningServer, tmp_path: Path) -> None:
    ids = [list(collect.wire_plans(missing_plans(config(server, tmp_path), [KNOWN_STATE]), 4)) for _ in range(2)]
    assert ids[0][0][0].episode_id != ids[1][0][0].episode_id
    assert ids[0][0][0].entropy == ids[1][0][0].entropy == (0, 0, 0)


AWAY = ItemError("UNAVAILABLE", "REWARD_UNAVAILABLE", "reward", "an answer", "none", "wait")


class Flaky(StubBackend):
    """Cannot run the second episode of a collection."""

    broken_now = True

    def step(self, items: Sequence[BackendStep]) -> list[BackendChunk | ItemError]:
        done = super().step(items)
        return [
            AWAY if self.broken_now and item.episode_id.endswith("/1") else outcome
            for item, outcome in zip(items, done, strict=True)
        ]


def test_failed_episodes_are_counted_named_and_run_again_by_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.calls.time.sleep", lambda seconds: None)
    backend = Flaky()
    running = start_environment_server(backend, None, ServerSettings())
    try:
        settings = config(running, tmp_path, episodes=2, initial_states=one_state(tmp_path))
        assert main(arguments(settings)) == 1
        said = capsys.readouterr()
        assert "1 episodes added, 1 in all" in said.out
        assert f"{KNOWN_STATE} failed: " in said.err
        assert "1 episodes failed and are not recorded; the same command runs them again" in said.err
        backend.broken_now = False
        assert main(arguments(settings)) == 0
        assert "1 episodes added, 2 in all" in capsys.readouterr().out
    finally:
        running.stop(0)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"mode": "mean"}, "mode: expected 'sample', got 'mean'"),
        ({"noise_level": 0.7}, "noise_level: expected 0.3, got 0.7"),
        ({"seed": 1}, "run_seed: expected 0, got 1"),
        ({"first_state": 1, "episodes": 2}, "initial_state_id: expected"),
        ({"policy": "other"}, "policy_sha256: expected"),
        ({"target": "other"}, "provenance_fingerprint: expected"),
    ],
)
def test_episodes_of_another_origin_are_not_mixed_in(
    server: RunningServer, tmp_path: Path, changes: dict[str, object], name: str
) -> None:
    settings = config(server, tmp_path)
    run(settings)
    other = start_environment_server(
        StubBackend(contract=adjust_bottle("simulator", "stub", {"renderer": "another"})), None, ServerSettings()
    )
    try:
        if "policy" in changes:
            changes = {"policy": save_policy(FlowPolicy(flow_mini(), 1), tmp_path / "other", {})}
        if "target" in changes:
            changes = {"target": other.address}
        with pytest.raises(ValueError, match=name):
            run(dataclasses.replace(settings, **{"episodes": 2, **changes}))  # type: ignore[arg-type]
    finally:
        other.stop(0)
    assert len(EpisodeReader(settings.out)) == 1


def test_a_data_set_that_was_renamed_goes_on_under_its_first_name(server: RunningServer, tmp_path: Path) -> None:
    settings = config(server, tmp_path)
    run(settings)
    renamed = dataclasses.replace(settings, out=settings.out.rename(tmp_path / "renamed"))
    done = run(renamed)
    assert (done.added, done.total) == (0, 1)
    second = collect.planned_episodes(dataclasses.replace(renamed, episodes=2), [KNOWN_STATE])[1]
    assert (second.episode_id, second.entropy) == ("rollouts-sample-0/0/1", (0, 0, 1))


def test_a_data_set_of_episodes_with_other_names_is_refused(server: RunningServer, tmp_path: Path) -> None:
    settings = config(server, tmp_path)
    run(settings)
    [first] = EpisodeReader(settings.out)
    with EpisodeWriter(settings.out) as writer:
        writer.append(dataclasses.replace(first, episode_id="noisy-sample-0/0/0", frame_source=first.frames))
    with pytest.raises(ValueError, match=r"expected episodes rollouts-sample-0/0/0, .*; got 'noisy-sample-0/0/0'"):
        run(settings)


def test_a_world_model_that_nobody_judges_is_recorded_without_verdicts_and_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = Unaware(contract=adjust_bottle("world_model", "stub", {"judge": "none"}))
    running = start_environment_server(backend, None, ServerSettings())
    try:
        settings = config(running, tmp_path, initial_states=one_state(tmp_path))
        assert main(arguments(settings)) == 0
        said = capsys.readouterr()
        assert "1 episodes added, 1 in all, none judged" in said.out
        assert "is a world model without a reward server; the episodes get no verdict" in said.err
        assert main(arguments(settings)) == 0
        assert "0 episodes added, 1 in all" in capsys.readouterr().out
    finally:
        running.stop(0)
    [episode] = EpisodeReader(settings.out)
    assert (episode.success, episode.verdict) == (None, None)


class Unaware(StubBackend):
    """Knows no success, as a world model."""

    def step(self, items: Sequence[BackendStep]) -> list[BackendChunk | ItemError]:
        return [
            outcome if isinstance(outcome, ItemError) else dataclasses.replace(outcome, success=None)
            for outcome in super().step(items)
        ]


def test_a_server_that_is_not_there_leaves_no_data_set(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: EnvironmentClient) -> None:
        raise ConnectionError("no answer in time")

    monkeypatch.setattr(EnvironmentClient, "get_contract", away)
    settings = config(server, tmp_path)
    assert main(arguments(settings)) == 1
    assert not settings.out.exists()


def test_a_call_that_fails_is_told_in_one_line_with_what_goes_on(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def restarted(*arguments: object, **options: object) -> None:
        raise ItemFailedError([AWAY] * 32)

    monkeypatch.setattr(collect, "collect_rollout", restarted)
    assert main(arguments(config(server, tmp_path))) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.count("REWARD_UNAVAILABLE") == 1
    assert "31 more items" in line
    assert "holds 0 episodes, the same command goes on from there" in line


def test_an_interrupted_collection_says_how_to_go_on(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(collect, "collect_rollout", interrupted)
    assert main(arguments(config(server, tmp_path))) == 130
    assert "holds 0 episodes, the same command goes on" in capsys.readouterr().err
