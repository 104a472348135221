"""`worldserve contract show | diff`, on live servers and on files."""

from __future__ import annotations

import dataclasses
import json
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
