"""What a run notes of its inputs, and whom it refuses: every command that drives a target, over a real socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from services.trainer import collect, evaluate, ppo_command
from services.trainer.policies import FlowPolicy, flow_mini, save_policy
from services.trainer.run_record import read_json
from tests.worldserve.serving.conftest import StubBackend
from worldserve import __version__
from worldserve.contract import fingerprint
from worldserve.episodes import InitialStateSet
from worldserve.files import file_sha256
from worldserve.serving import RunningServer, ServerSettings, start_environment_server

ROOT = Path(__file__).parents[3]
Command = Callable[[Sequence[str]], int]
PPO_SIZES = [
    "--iterations",
    "1",
    "--critic-warmup-iterations",
    "0",
    "--episodes-per-iteration",
    "2",
    "--update-epochs",
    "1",
    "--policy-batch",
    "2",
    "--reward-source",
    "success",
    "--learning-rate",
    "1e-6",
]
COMMANDS: dict[str, tuple[Command, list[str]]] = {
    "collect": (collect.main, ["--episodes", "1"]),
    "evaluate": (evaluate.main, ["--evaluation-seeds", "0"]),
    "ppo": (ppo_command.main, PPO_SIZES),
}


@pytest.fixture
def server() -> Iterator[RunningServer]:
    running = start_environment_server(StubBackend(), None, ServerSettings())
    yield running
    running.stop(0)


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """A set of the one state that the stub knows."""
    InitialStateSet(InitialStateSet.load(ROOT / "initial_states" / "train").states[:1]).save(tmp_path / "states")
    return tmp_path / "states"


def call(name: str, server: RunningServer, states: Path, tmp_path: Path, interface: str) -> int:
    save_policy(FlowPolicy(flow_mini(interface_fingerprint=interface), 0), tmp_path / "policy", {})
    command, more = COMMANDS[name]
    paths = {"--policy": tmp_path / "policy", "--out": tmp_path / "out", "--initial-states": states}
    return command(
        ["--target", server.address, *(part for flag, path in paths.items() for part in (flag, str(path))), *more]
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_policy_of_another_interface_is_refused(
    name: str, server: RunningServer, states: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(name, server, states, tmp_path, "f00d") == 1
    said = capsys.readouterr().err
    got = fingerprint(StubBackend().contract.interface)
    assert f"expected a target with interface f00d, for which it was trained; {server.address} has {got}." in said
    assert "Name another --target or --policy" in said
    assert not (tmp_path / "out" / "config.json").exists()  # so that the corrected command needs no --resume
    assert not (tmp_path / "out" / "evaluation.json").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_notes_versions_contract_and_inputs_at_every_start(
    name: str, server: RunningServer, states: Path, tmp_path: Path
) -> None:
    contract = StubBackend().contract
    assert call(name, server, states, tmp_path, fingerprint(contract.interface)) == 0
    [start] = read_json(tmp_path / "out" / "run.json")["starts"]
    assert start["command"] == f"worldserve {name}"
    assert start["versions"]["worldserve"] == __version__
    assert start["versions"]["torch"] == torch.__version__
    assert start["target"] == {
        "address": server.address,
        "kind": "simulator",
        "backend": "stub",
        "interface": fingerprint(contract.interface),
        "provenance": fingerprint(contract.provenance),
    }
    assert start["inputs"]["policy"] == {
        "path": str(tmp_path / "policy"),
        "model_sha256": file_sha256(tmp_path / "policy" / "model.safetensors"),
        "config_sha256": file_sha256(tmp_path / "policy" / "config.json"),
    }
    assert start["inputs"]["initial_states"] == {"path": str(states), "sha256": InitialStateSet.load(states).sha256}
    if name != "ppo":  # a finished PPO run goes on with --resume only
        assert call(name, server, states, tmp_path, fingerprint(contract.interface)) == 0
        assert len(read_json(tmp_path / "out" / "run.json")["starts"]) == 2
