"""`worldserve contract show | diff`, on live servers and on files."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.worldserve.serving.conftest import StubBackend, StubScorer
from worldserve.contract import Observation, contract_from_mapping, fingerprint, to_yaml
from worldserve.contract.command import main
from worldserve.serving import RunningServer, ServerSettings, start_environment_server, start_reward_server


@pytest.fixture(scope="module")
def simulator() -> Iterator[RunningServer]:
    running = start_environment_server(StubBackend(), None, ServerSettings())
    yield running
    running.stop(0)


@pytest.fixture(scope="module")
def reward() -> Iterator[RunningServer]:
    running = start_reward_server(StubScorer(), ServerSettings())
    yield running
    running.stop(0)


@pytest.mark.parametrize("kind", ["simulator", "reward"])
def test_show_prints_a_contract_that_reads_back(
    kind: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    server: RunningServer = request.getfixturevalue(kind)
    assert main(["show", server.address]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"# interface  {fingerprint(server.contract.interface)}\n")
    assert contract_from_mapping(yaml.safe_load(text)) == server.contract
    assert main(["show", server.address, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fingerprints"]["provenance"] == fingerprint(server.contract.provenance)


def test_servers_of_one_interface_are_equal_and_their_provenance_is_not(
    simulator: RunningServer, reward: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", simulator.address, reward.address]) == 0
    assert capsys.readouterr().out == f"equal: {fingerprint(simulator.contract.interface)}\n"
    assert main(["diff", simulator.address, reward.address, "--provenance"]) == 1
    assert 'kind: expected "simulator", got "reward_model"' in capsys.readouterr().out


def test_a_file_with_another_interface_differs_by_name(
    simulator: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interface = dataclasses.replace(simulator.contract.interface, observation=Observation(camera="wrist"))
    path = tmp_path / "contract.yaml"
    path.write_text(to_yaml(dataclasses.replace(simulator.contract, interface=interface)))
    assert main(["diff", simulator.address, str(path)]) == 1
    assert capsys.readouterr().out == 'observation.camera: expected "head", got "wrist"\n'


@pytest.mark.parametrize("source", ["127.0.0.1:1", "no/such/file.yaml"])
def test_a_contract_that_cannot_be_read_is_named(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", source, "--timeout", "0.2"]) == 2
    assert source in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["# Title\n\n- `a`: [b\n", "a: {b", "just words", ""], ids=["markdown", "cut", "words", "empty"]
)
@pytest.mark.parametrize("command", ["show", "diff"])
def test_a_file_that_is_no_contract_is_an_error_and_not_a_difference(
    command: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.md"
    path.write_text(text)
    assert main([command, *[str(path)] * (2 if command == "diff" else 1)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"worldserve contract: {path}: contract: expected ")


def test_a_reader_that_went_away_is_left_to_the_program(
    simulator: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", away)
    with pytest.raises(BrokenPipeError):
        main(["show", simulator.address])


def test_without_pyyaml_the_way_round_it_is_named(
    simulator: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "yaml")
    monkeypatch.setattr(sys, "path", [])
    assert main(["show", simulator.address]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "YAML needs the Python package PyYAML" in line
    assert "--json" in line
    assert main(["show", simulator.address, "--json"]) == 0


def test_the_time_to_wait_is_in_the_help_and_longer_than_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    assert "(default: 60)" in capsys.readouterr().out
