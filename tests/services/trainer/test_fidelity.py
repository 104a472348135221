"""Fidelity, end to end over real sockets: a world that shows its outcome as brightness, and one that draws it wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer import fidelity
from services.trainer.directories import claim_out
from services.trainer.fidelity import FidelityConfig, choose, read_probabilities, read_result
from tests.services.trainer.fidelity_world import (
    BRIGHT,
    DARK,
    EPISODES,
    Servers,
    constant,
    contract,
    episode,
    result,
    rows,
    serving,
    state_id,
)
from tests.worldserve.serving.conftest import StubScorer
from worldserve.contract import fingerprint
from worldserve.episodes import EpisodeReader, EpisodeWriter, read_video
from worldserve.serving import ServerSettings, start_reward_server


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fidelity") / "recorded"
    with EpisodeWriter(directory) as writer:
        for number, (state, success) in enumerate(EPISODES):
            writer.append(episode(number, state, success))
    return directory


@pytest.fixture
def servers() -> Iterator[Servers]:
    """The world model draws the failure of state 0 and one of state 1 as successes, and misses state 2's success."""
    with serving(fooled={1, 2}, missed={5}) as running:
        yield running


def test_rates_of_both_sides_against_the_recording(servers: Servers, data: Path, tmp_path: Path) -> None:
    assert fidelity.main(servers.flags(data, tmp_path)) == 0
    found = result(tmp_path)
    assert {name: found["reference"][name]["value"] for name in found["reference"]} == {
        "fake_success": 0.0, "recall": 1.0, "discrimination": 1.0,
    }  # fmt: skip
    # 2 of 3 failures are drawn as successes, 2 of 3 successes as successes.
    assert found["target"]["fake_success"]["value"] == pytest.approx(2 / 3)
    assert found["target"]["recall"]["value"] == pytest.approx(2 / 3)
    assert found["target"]["discrimination"]["value"] == pytest.approx(0.0)
    assert set(found["target"]["recall"]) == {"value", "low", "high", "count", "confidence"}
    assert (found["target"]["fake_success"]["count"], found["target"]["recall"]["count"]) == (2, 3)
    assert found["counts"] == {"episodes": 6, "failures": 3, "successes": 3, "states": 3, "states_with_both": 2}
    assert found["truth"] == "recorded"
    assert found["states"][state_id(1)] == {
        "failures": 2, "fake_successes": 1, "successes": 1, "recalled": 1,
        "reference_fake_successes": 0, "reference_recalled": 1,
    }  # fmt: skip
    assert not servers.simulator.resets
    assert len(servers.model.closed) == 6


def test_rows_are_what_other_jobs_read(servers: Servers, data: Path, tmp_path: Path) -> None:
    fidelity.main(servers.flags(data, tmp_path))
    row = rows(tmp_path)[1]
    assert (row["episode_id"], row["initial_state_id"], row["seed"]) == ("recorded/1", state_id(0), 1)
    assert row["success"] is False
    assert row["reference"] == {"success": False, "peak": pytest.approx(0.2)}
    assert row["target"] == {"success": True, "peak": pytest.approx(0.8)}
    # 5 of 20 frames are 150 levels off; the reference never moves, and so has no moving pixels.
    assert row["psnr_db"] == pytest.approx(10 * np.log10(255**2 / (150**2 / 4)))
    assert row["moving_psnr_db"] is None
    assert 0.0 < row["ssim"] < 1.0
    right = rows(tmp_path)[0]
    assert (right["psnr_db"], right["moving_psnr_db"], right["ssim"]) == (None, None, pytest.approx(1.0))
    missed = rows(tmp_path)[5]  # the reference moves in 5 frames, all of them missed
    assert missed["moving_psnr_db"] == pytest.approx(10 * np.log10(255**2 / 150**2))
    arrays = read_probabilities(tmp_path, row)
    np.testing.assert_array_equal(arrays["frame_indices"], np.arange(6, 21))
    np.testing.assert_allclose(arrays["target"], [0.2] * 10 + [0.8] * 5, rtol=1e-6)
    np.testing.assert_allclose(arrays["reference"], [0.2] * 15, rtol=1e-6)


def test_the_result_is_read_by_name(servers: Servers, data: Path, tmp_path: Path) -> None:
    fidelity.main(servers.flags(data, tmp_path))
    found = read_result(tmp_path)
    assert found.target.fake_success is not None
    assert found.target.fake_success.value == pytest.approx(2 / 3)
    assert (found.episodes, found.failures, found.successes, found.states) == (6, 3, 3, 3)
    assert found.target_weights_sha256 == "abc"
    assert found.target_provenance == fingerprint(servers.model.contract.provenance)
    assert found.reference_provenance == fingerprint(contract("simulator").provenance)
    assert found.reward_provenance == fingerprint(servers.scorer.contract.provenance)
    assert found.interface == fingerprint(servers.model.contract.interface)
    assert found.data == str(data)
    [start] = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert start["inputs"]["reward"]["provenance"] == found.reward_provenance
    assert start["inputs"]["data"]["sha256"] == found.data_sha256


def test_a_replayed_simulator_gives_the_truth_and_is_compared_with_the_recording(
    servers: Servers, data: Path, tmp_path: Path
) -> None:
    relabelled = tmp_path / "relabelled"
    with EpisodeWriter(relabelled) as writer:
        for number, (state, success) in enumerate(EPISODES[:3]):
            recorded = not success if number == 2 else success  # one recorded outcome is not what the simulator gives
            writer.append(dataclasses.replace(episode(number, state, success), success=recorded))
    out = tmp_path / "out"
    assert fidelity.main(servers.flags(relabelled, out, "--reference", servers.addresses["simulator"])) == 0
    found = result(out)
    assert found["truth"] == "reference"
    assert found["recorded"] == {
        "labels_differing": 1, "episodes_differing": ["recorded/2"], "frames_compared": 3, "frames_equal": 3,
    }  # fmt: skip
    assert [row["success"] for row in rows(out)] == [True, False, False]
    assert found["identity"]["reference_provenance"] == fingerprint(servers.simulator.contract.provenance)
    assert found["identity"]["target_drawn"] == {}  # the stub states its weights alone
    assert len(servers.simulator.closed) == 3


def test_every_disagreement_is_a_video(servers: Servers, data: Path, tmp_path: Path) -> None:
    fidelity.main(servers.flags(data, tmp_path))
    index = json.loads((tmp_path / "videos" / "videos.json").read_text())
    assert [(video["episode_id"], video["kind"]) for video in index] == [
        ("recorded/1", "fake_success"),
        ("recorded/2", "fake_success"),
        ("recorded/5", "missed_success"),
    ]
    frames = read_video(tmp_path / "videos" / index[0]["video"])
    assert frames.shape == (21, 32, 72, 3)
    assert abs(int(frames[-1, 16, 8, 0]) - DARK) < 10  # reference left
    assert abs(int(frames[-1, 16, 64, 0]) - BRIGHT) < 10  # target right
    assert not [path for path in (tmp_path / "videos").iterdir() if path.name.startswith(".")]


def test_videos_are_capped_and_a_later_call_adds_those_that_are_missing(
    servers: Servers, data: Path, tmp_path: Path
) -> None:
    fidelity.main(servers.flags(data, tmp_path, "--videos", "0"))
    assert not (tmp_path / "videos").exists()
    servers.model.resets.clear()
    fidelity.main(servers.flags(data, tmp_path, "--videos", "2"))
    assert len(servers.model.resets) == 2
    assert len(json.loads((tmp_path / "videos" / "videos.json").read_text())) == 2
    assert len(rows(tmp_path)) == 6


def test_a_second_call_runs_only_what_is_missing(servers: Servers, data: Path, tmp_path: Path) -> None:
    flags = servers.flags(data, tmp_path)
    fidelity.main(flags)
    first = result(tmp_path)
    kept = (tmp_path / "episodes.jsonl").read_text().splitlines(keepends=True)
    # A kill: two whole lines and a torn one.
    (tmp_path / "episodes.jsonl").write_text("".join(kept[:2]) + kept[2][:40])
    servers.model.resets.clear()
    assert fidelity.main(flags) == 0
    assert len(servers.model.resets) == 4
    assert sorted(row["episode_id"] for row in rows(tmp_path)) == [f"recorded/{n}" for n in range(6)]
    again = result(tmp_path)
    for changing in ("trainer_cpu_s", "wall_s"):
        del first[changing], again[changing]
    assert again == first
    servers.model.resets.clear()
    assert fidelity.main(flags) == 0
    assert not servers.model.resets


def test_other_settings_are_refused_and_fresh_throws_away_only_a_measurement(
    servers: Servers, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fidelity.main(servers.flags(data, tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    assert fidelity.main(servers.flags(data, tmp_path, "--episodes", "2")) == 1
    assert "data_sha256" in capsys.readouterr().err
    assert fidelity.main(servers.flags(data, tmp_path, "--episodes", "2", "--fresh")) == 0
    assert len(rows(tmp_path)) == 2
    assert (tmp_path / "notes.txt").read_text() == "mine"
    other = tmp_path / "videos"
    assert fidelity.main(servers.flags(data, other)) == 1
    assert "holds other things" in capsys.readouterr().err


def test_a_directory_that_another_process_measures_into_is_refused(
    servers: Servers, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with claim_out(tmp_path):
        assert fidelity.main(servers.flags(data, tmp_path)) == 1
    assert f"out: another process writes in {tmp_path}; wait for it" in capsys.readouterr().err
    assert not (tmp_path / "episodes.jsonl").exists()
    assert fidelity.main(servers.flags(data, tmp_path)) == 0
    measured = rows(tmp_path)
    with claim_out(tmp_path):
        assert fidelity.main(servers.flags(data, tmp_path, "--fresh")) == 1
    assert rows(tmp_path) == measured


def test_a_failed_episode_leaves_the_others_and_a_rerun_does_only_it(
    servers: Servers, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers.model.refused = {2}
    flags = servers.flags(data, tmp_path)
    assert fidelity.main(flags) == 1
    assert "recorded/2 failed: NOT_FOUND" in capsys.readouterr().err
    assert len(rows(tmp_path)) == 5
    assert len(result(tmp_path)["failed"]) == 1
    with pytest.raises(ValueError, match="1 episodes failed"):
        read_result(tmp_path)
    servers.model.refused = set()
    servers.model.resets.clear()
    assert fidelity.main(flags) == 0
    assert len(servers.model.resets) == 1
    assert read_result(tmp_path).episodes == 6


def test_probabilities_that_are_not_finite_fail_the_episode(servers: Servers, data: Path, tmp_path: Path) -> None:
    servers.scorer.broken = True
    assert fidelity.main(servers.flags(data, tmp_path, "--episodes", "1")) == 1
    assert not (tmp_path / "result.json").exists()
    assert not (tmp_path / "episodes.jsonl").exists()


def test_actions_that_a_target_changes_are_no_replay(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = constant(2.0)  # farther than one action may move
    with EpisodeWriter(tmp_path / "wild") as writer:
        writer.append(episode(0, 0, True, executed_actions=wild))
    assert fidelity.main(servers.flags(tmp_path / "wild", tmp_path / "out")) == 1
    assert "ACTIONS_CHANGED" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frame_source": None}, "episodes with frames"),
        ({"success": None}, "their true success"),
    ],
)
def test_episodes_that_cannot_be_compared_are_refused_before_anything_runs(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    with EpisodeWriter(tmp_path / "bad") as writer:
        writer.append(episode(0, 0, True, **changes))
    assert fidelity.main(servers.flags(tmp_path / "bad", tmp_path / "out")) == 1
    assert message in capsys.readouterr().err
    assert not servers.model.resets
    assert not (tmp_path / "out").exists()


def test_another_interface_is_refused(servers: Servers, data: Path, tmp_path: Path) -> None:
    interface = dataclasses.replace(servers.model.contract.interface, task="another")
    other = dataclasses.replace(contract("world_model"), interface=interface)
    with serving(contract=other) as running:
        assert fidelity.main(running.flags(data, tmp_path / "out")) == 1
        assert not running.model.resets


def test_another_reward_under_way_ends_the_measurement(servers: Servers, data: Path, tmp_path: Path) -> None:
    class Replaced:
        """Serves another contract from the second question on."""

        asked = 0

        def __get__(self, scorer: Any, owner: Any) -> Any:
            Replaced.asked += 1
            return contract("reward_model", weights_sha256=str(Replaced.asked))

    class Changing(StubScorer):
        contract = Replaced()

        def __init__(self) -> None:
            self.threshold, self.broken = 0.5, False

    running = start_reward_server(Changing(), ServerSettings())
    flags = servers.flags(data, tmp_path)
    flags[flags.index("--reward") + 1] = running.address
    try:
        assert fidelity.main(flags) == 1
    finally:
        running.stop(0)
    assert not (tmp_path / "result.json").exists()


def test_ctrl_c_frees_the_episodes_and_the_same_command_goes_on(
    servers: Servers, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = fidelity.Measurement._keep, []

    def interrupted(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(fidelity.Measurement, "_keep", interrupted)
    assert fidelity.main(servers.flags(data, tmp_path)) == 130
    assert len(rows(tmp_path)) == 2
    assert sorted(servers.model.closed) == sorted(servers.model.resets)
    assert fidelity.main(servers.flags(data, tmp_path)) == 0
    assert len(rows(tmp_path)) == 6


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"first": 2}, [2, 3, 4, 5]),
        ({"first": 1, "episodes": 2}, [1, 2]),
        ({"failures": 1}, [0, 1, 4, 5]),
        ({"failures": 2, "successes": 1}, [0, 1, 2]),
        ({"successes": 1, "episodes": 3}, [0, 1, 2]),
        ({"states": 2}, [0, 1, 2, 3, 4]),
        ({"states": 2, "first": 3}, [3, 4, 5]),
        ({"states": 1, "failures": 1}, [0, 1]),
    ],
)
def test_which_episodes_are_replayed(data: Path, changes: dict[str, int], expected: list[int]) -> None:
    config = FidelityConfig((data,), target="a:1", reward="b:1", **changes)  # type: ignore[arg-type]
    assert choose(EpisodeReader(data).infos, config) == expected


def test_no_episode_is_an_error(data: Path) -> None:
    with pytest.raises(ValueError, match="from position 6 on"):
        choose(EpisodeReader(data).infos, FidelityConfig((data,), target="a:1", reward="b:1", first=6))


@pytest.mark.parametrize(
    "flags",
    [
        ["--batch", "0"],
        ["--episodes", "-1"],
        ["--consecutive", "0"],
        ["--confidence", "1"],
        ["--moving-threshold", "nan"],
    ],
)
def test_settings_that_mean_nothing_are_usage_errors(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fidelity.main(["runs/rollouts", "--target", "127.0.0.1:1", "--reward", "127.0.0.1:1", *flags])
    assert ended.value.code == 2
    assert "expected" in capsys.readouterr().err
