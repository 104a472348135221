"""Forks: what follows from the rows by hand, and the command end to end over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.trainer import forks
from services.trainer.fork_states import mixed_states, read_fidelity_rows, summarise_states
from services.trainer.forks import summarise
from tests.services.trainer.fork_world import ForkBackend, episode
from tests.worldserve.serving.conftest import StubScorer
from worldserve.client import EnvironmentClient
from worldserve.contract import fingerprint
from worldserve.episodes import EpisodeReader, EpisodeWriter
from worldserve.serving import RunningServer, ServerSettings, start_environment_server, start_reward_server
from worldserve.serving.judge import RemoteJudge


def rollout(state: str, success: bool, read: bool, name: str = "e") -> dict[str, Any]:
    return {"episode_id": name, "initial_state_id": state, "success": success, "target": {"success": read, "peak": 0.5}}


# State a is mixed: 2 failures, one read as success, and a success that is missed. States b and c are single.
ROWS = [
    rollout("a", False, True), rollout("a", False, False), rollout("a", True, False), rollout("a", True, True),
    rollout("b", False, True), rollout("c", True, True), rollout("c", True, True),
]  # fmt: skip


def test_states_with_both_outcomes_are_mixed() -> None:
    assert mixed_states(ROWS) == {"a"}


def test_rates_on_mixed_and_on_single_states() -> None:
    result = summarise(ROWS, [], [], 0.9, 0)
    mixed, single = result["mixed"], result["single"]
    assert mixed["fake_success"]["value"] == mixed["recall"]["value"] == 0.5
    assert mixed["discrimination"]["value"] == 0.0
    assert (mixed["states"], mixed["failures"], mixed["successes"]) == (1, 2, 2)
    assert single["fake_success"]["value"] == single["recall"]["value"] == 1.0
    assert single["states"] == 2
    assert mixed["above_floor"] is None  # no floor was measured
    assert result["floor"]["flip_rate"] is result["pairs"]["both_right"] is None


def floor_row(state: str, unmoved: bool, flips: int) -> dict[str, Any]:
    shifted = {name: unmoved ^ (number < flips) for number, name in enumerate(("+x", "-x", "+y", "-y"))}
    return {"initial_state_id": state, "recorded": unmoved, "unmoved": unmoved, "shifted": shifted}


def test_above_the_floor_is_fake_success_minus_the_failures_that_half_a_pixel_turns_to_success() -> None:
    floor = [floor_row("a", False, 1), floor_row("a", False, 0), floor_row("a", True, 4), floor_row("b", False, 4)]
    assert summarise_states(ROWS, floor, {"a"}, 0.9, 0)["above_floor"]["value"] == 0.5 - 1 / 8
    assert summarise_states(ROWS, floor, {"b"}, 0.9, 0)["above_floor"]["value"] == 1.0 - 1.0
    assert summarise_states(ROWS, floor, {"a"}, 0.9, 0)["floor_failures"] == {"episodes": 2, "states": 1}


def test_states_are_what_is_drawn_again() -> None:
    rows = [rollout("a", False, True)] * 50 + [rollout("b", False, False)] * 50
    found = summarise_states(rows, [], {"a", "b"}, 0.9, 0)["fake_success"]
    assert (found["value"], found["low"], found["high"], found["count"]) == (0.5, 0.0, 1.0, 2)


def test_no_mixed_state_leaves_its_rates_undefined() -> None:
    result = summarise([rollout("b", False, True)], [], [], 0.9, 0)
    assert result["mixed"]["fake_success"] is None
    assert result["mixed"]["states"] == 0


@pytest.mark.parametrize(
    "line", ['{"episode_id": "a"}', '{"episode_id": "a", "initial_state_id": "s", "success": null}']
)
def test_rows_that_are_no_fidelity_rows_are_refused_by_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "episodes.jsonl").write_text(json.dumps(rollout("a", True, True)) + "\n" + line + "\n")
    with pytest.raises(ValueError, match="line 2: expected episode_id"):
        read_fidelity_rows(tmp_path)


def test_no_fidelity_run_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="worldserve fidelity --out"):
        read_fidelity_rows(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shift-x-mm", "80"], "at most 50"),
        (["--sizes-mm", "8", "4"], "growing sizes"),
        (["--sizes-actions", "1.5"], "whole numbers"),
        (["--pairs", "-1"], "expected at least 0"),
        (["--skip-pairs", "--record", "runs/pairs"], "pairs to record"),
        (["--split", "unseen", "--record", "runs/pairs"], "recorded pairs are training data"),
    ],
)
def test_settings_that_mean_nothing_are_usage_errors(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    required = ["data", "--fidelity", "f", "--target", "h:1", "--reference", "h:2", "--out", "o"]
    required += [] if "--split" in flags else ["--split", "train"]
    with pytest.raises(SystemExit) as ended:
        forks.main([*required, *flags])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[RunningServer, RunningServer]]:
    """(target, reference): a world model that forgives 40 mm, in a world that forgives 4."""
    settings = ServerSettings()
    reward = start_reward_server(StubScorer(), settings)
    judge_fingerprint = fingerprint(StubScorer().contract.provenance)
    facts = {"judge": "reward_model", "reward_provenance": judge_fingerprint, "weights_sha256": "ab" * 32}
    target = start_environment_server(ForkBackend(40.0, "world_model", facts), RemoteJudge(reward.address), settings)
    reference = start_environment_server(ForkBackend(4.0, "simulator", {"judge": "ground_truth"}), None, settings)
    yield target, reference
    for server in (target, reference, reward):
        server.stop(0)


@pytest.fixture
def command(servers: tuple[RunningServer, RunningServer], tmp_path: Path) -> list[str]:
    return made(servers, tmp_path, "validation")


def made(servers: tuple[RunningServer, RunningServer], tmp_path: Path, purpose: str) -> list[str]:
    """A command on 4 episodes of 2 states, one of them mixed, with the fidelity run that it needs."""
    target, reference = servers
    states = [f"adjust_bottle/{purpose}/0000"] * 2 + [f"adjust_bottle/{purpose}/0001"] * 2
    errors_mm = [0.0, 6.0, 0.0, 2.0]
    with EpisodeWriter(tmp_path / "data") as writer:
        for number, (state, error) in enumerate(zip(states, errors_mm, strict=True)):
            writer.append(replace(episode(number, error, error < 4, state), metadata={}))
    rows = [
        rollout(info.initial_state_id, bool(info.success), True, info.episode_id)
        for info in EpisodeReader(tmp_path / "data").infos
    ]
    with EnvironmentClient(target.address) as client:
        contract = client.get_contract()
    fidelity = tmp_path / "fidelity"
    fidelity.mkdir()
    (fidelity / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    undefined = dict.fromkeys(("fake_success", "recall", "discrimination"))
    identity = {
        "target_weights_sha256": "ab" * 32, "target_provenance": fingerprint(contract.provenance),
        "interface": fingerprint(contract.interface), "reference_provenance": "", "reward_provenance": fingerprint(StubScorer().contract.provenance),
        "data": "", "data_sha256": "",
    }  # fmt: skip
    counts = {"episodes": 4, "failures": 1, "successes": 3, "states": 2}
    result = {"failed": [], "counts": counts, "identity": identity, "reference": undefined, "target": undefined}
    (fidelity / "result.json").write_text(json.dumps(result))
    return [
        str(tmp_path / "data"), "--fidelity", str(fidelity), "--target", target.address, "--reference",
        reference.address, "--out", str(tmp_path / "out"), "--split", "unseen", "--kinds", "offset", "--pairs", "2",
    ]  # fmt: skip


def test_the_parts_may_be_run_apart_and_the_result_holds_them_all(command: list[str], tmp_path: Path) -> None:
    assert forks.main([*command, "--skip-pairs", "--floor-episodes", "1"]) == 0
    assert len((tmp_path / "out" / "floor.jsonl").read_text().splitlines()) == 1
    assert forks.main([*command, "--skip-pairs"]) == 0
    assert forks.main([*command, "--skip-floor"]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["split"], result["purposes"]) == ("unseen", ["validation"])
    assert result["mixed"]["fake_success"]["value"] == 1.0
    # The failure, 6 mm off in x, comes within 4 mm by the shift of -3.24 mm alone: one flip of four.
    assert result["floor"]["failure_to_success"]["value"] == 0.25
    assert result["mixed"]["above_floor"]["value"] == 0.75
    assert result["mixed"]["floor_failures"] == {"episodes": 1, "states": 1}
    assert result["shifts_mm"] == {"x": 3.24, "y": 4.63}
    assert (result["floor"]["episodes"], result["floor"]["not_reproduced"]) == (4, 0)
    # The world model forgives what the simulator does not.
    assert (result["pairs"]["count"], result["pairs"]["both_success"]["value"]) == (2, 1.0)
    assert result["identity"]["target_weights_sha256"] == "ab" * 32


def test_pairs_are_recorded_from_train_states(servers: tuple[RunningServer, RunningServer], tmp_path: Path) -> None:
    command = made(servers, tmp_path, "train")
    command[command.index("unseen")] = "train"
    assert forks.main([*command, "--skip-floor", "--record", str(tmp_path / "pairs")]) == 0
    assert len(EpisodeReader(tmp_path / "pairs")) == 4
    assert json.loads((tmp_path / "out" / "result.json").read_text())["purposes"] == ["train"]


@pytest.mark.parametrize(
    ("purpose", "split", "message"),
    [
        ("train", "unseen", "expected validation or test states for --split unseen; got 2 others, such as 'adjust_bottle/train/0000'"),
        ("validation", "train", "expected train states for --split train; got 2 others"),
    ],
)  # fmt: skip
def test_a_split_is_what_its_states_are_of(
    purpose: str, split: str, message: str, servers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = made(servers, tmp_path, purpose)
    command[command.index("unseen")] = split
    assert forks.main([*command, "--skip-pairs", "--skip-floor"]) == 1
    assert message in capsys.readouterr().err


def test_other_settings_another_target_and_other_directories_are_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip = ["--skip-pairs", "--skip-floor"]
    assert forks.main([*command, *skip]) == 0
    assert forks.main([*command, *skip, "--shift-x-mm", "5"]) == 1
    assert "shift_x_mm: expected 3.24; got 5.0" in capsys.readouterr().err
    fidelity = tmp_path / "fidelity" / "result.json"
    fidelity.write_text(fidelity.read_text().replace("ab" * 32, "cd" * 32))
    assert forks.main([*command, *skip]) == 1
    assert "measured another target" in capsys.readouterr().err
    fidelity.write_text(fidelity.read_text().replace("cd" * 32, "ab" * 32))
    assert forks.main([*command, *skip, "--out", str(tmp_path / "data")]) == 1
    assert "holds other things" in capsys.readouterr().err


def test_a_fidelity_run_that_another_reward_read_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fidelity = tmp_path / "fidelity" / "result.json"
    result = json.loads(fidelity.read_text())
    result["identity"]["reward_provenance"] = "cd" * 32
    fidelity.write_text(json.dumps(result))
    assert forks.main([*command, "--skip-pairs", "--skip-floor"]) == 1
    assert f"reward_provenance: expected '{'cd' * 32}'" in capsys.readouterr().err


def test_a_world_model_is_no_reference(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    target = command[command.index("--target") + 1]
    assert forks.main([*command, "--reference", target]) == 1
    assert "reference: expected a simulator" in capsys.readouterr().err
