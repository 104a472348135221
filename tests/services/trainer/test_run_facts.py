"""What a run notes of its inputs, and whom it refuses: every command that drives a target, over a real socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from services.trainer import collect, evaluate, ppo_command
from services.trainer.policies import FlowPolicy, flow_mini, save_policy
from services.trainer.ppo_config import PPOConfig
from services.trainer.run_facts import check_reward_source, check_same_target, target_identity
from services.trainer.run_record import read_json, write_json
from tests.worldserve.serving.conftest import StubBackend
from worldserve import __version__
from worldserve.contract import Contract, adjust_bottle, fingerprint
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
Started = Callable[[Contract], RunningServer]
COMMANDS: dict[str, tuple[Command, list[str]]] = {
    "collect": (collect.main, ["--episodes", "1"]),
    "evaluate": (evaluate.main, ["--evaluation-seeds", "0"]),
    "ppo": (ppo_command.main, PPO_SIZES),
}


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """A set of the one state that the stub knows."""
    InitialStateSet(InitialStateSet.load(ROOT / "initial_states" / "train").states[:1]).save(tmp_path / "states")
    return tmp_path / "states"


@pytest.fixture
def started() -> Iterator[Started]:
    """Starts servers of given contracts."""
    running: list[RunningServer] = []

    def start(contract: Contract) -> RunningServer:
        running.append(start_environment_server(StubBackend(contract=contract), None, ServerSettings()))
        return running[-1]

    yield start
    for server in running:
        server.stop(0)


def call(
    name: str, server: RunningServer, states: Path, tmp_path: Path, interface: str, extra: Sequence[str] = ()
) -> int:
    save_policy(FlowPolicy(flow_mini(interface_fingerprint=interface), 0), tmp_path / "policy", {})
    command, more = COMMANDS[name]
    paths = {"--policy": tmp_path / "policy", "--out": tmp_path / "out", "--initial-states": states}
    return command(
        [
            "--target",
            server.address,
            *(part for flag, path in paths.items() for part in (flag, str(path))),
            *more,
            *extra,
        ]
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


def test_ppo_goes_on_in_the_same_target_at_another_address_only(
    started: Started, states: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulator = adjust_bottle("simulator", "stub", {})
    interface = fingerprint(simulator.interface)
    first, moved = started(simulator), started(simulator)
    world_model = started(adjust_bottle("world_model", "stub", {"judge": "reward_model"}))
    assert call("ppo", first, states, tmp_path, interface) == 0
    # `success` would be refused in a world model by itself, so the other kind here is another simulator.
    another = started(adjust_bottle("simulator", "stub", {"camera": "another"}))
    assert call("ppo", another, states, tmp_path, interface, ["--resume"]) == 1
    assert "is another target:\n  provenance: expected" in capsys.readouterr().err
    assert call("ppo", moved, states, tmp_path, interface, ["--resume"]) == 0
    starts = read_json(tmp_path / "out" / "run.json")["starts"]
    assert [start["target"]["address"] for start in starts] == [first.address, moved.address]
    with pytest.raises(ValueError, match=r"(?s)kind: expected 'simulator'; got 'world_model'.*its port may change"):
        check_same_target(tmp_path / "out", world_model_contract(), world_model.address)


def world_model_contract() -> Contract:
    return adjust_bottle("world_model", "stub", {"judge": "reward_model"})


def test_a_run_that_noted_no_target_may_go_on(tmp_path: Path) -> None:
    check_same_target(tmp_path, world_model_contract(), "localhost:1")


@pytest.mark.parametrize(
    ("kind", "judge", "source", "said"),
    [
        ("world_model", "reward_model", "success", "Use --reward-source verdict, or name a simulator"),
        ("world_model", "none", "verdict", "with --reward HOST:PORT."),
        ("simulator", "ground_truth", "verdict", "with --reward HOST:PORT, or use --reward-source success."),
        ("reward_model", "", "verdict", "expected a simulator or a world model"),
    ],
)
def test_a_reward_that_the_target_cannot_give_is_refused(kind: str, judge: str, source: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_reward_source(adjust_bottle(kind, "stub", {"judge": judge}), "localhost:1", source)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "judge", "source"),
    [
        ("world_model", "reward_model", "verdict"),
        ("simulator", "reward_model", "verdict"),
        ("simulator", "ground_truth", "success"),
        ("simulator", "reward_model", "success"),
        ("world_model", "", "verdict"),  # a server that does not say is asked
    ],
)
def test_a_reward_that_the_target_gives_passes(kind: str, judge: str, source: str) -> None:
    facts = {"judge": judge} if judge else {}
    check_reward_source(adjust_bottle(kind, "stub", facts), "localhost:1", source)


def test_a_refused_ppo_does_not_block_its_directory(
    started: Started, states: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = started(world_model_contract())
    assert call("ppo", target, states, tmp_path, fingerprint(StubBackend().contract.interface)) == 1
    assert "reward_source: expected a simulator for 'success'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_interrupted_ppo_names_what_there_is_to_go_on_from(
    server: RunningServer,
    states: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ppo_command, "train", interrupted)
    assert call("ppo", server, states, tmp_path, fingerprint(StubBackend().contract.interface)) == 130
    said = capsys.readouterr().err
    assert "interrupted before the first checkpoint; the same command with --resume starts over" in said
    assert "is whole" not in said
    config = PPOConfig(
        target=server.address,
        policy=tmp_path / "policy",
        out=tmp_path / "demo",
        initial_states=states,
        reward_source="success",
    )
    with pytest.raises(KeyboardInterrupt):  # `worldserve demo` names its own command, and ours would contradict it
        ppo_command.run(config)
    assert "--resume" not in capsys.readouterr().err
    write_json(tmp_path / "out" / "checkpoints" / "iteration_0003" / "state.json", {})
    assert "checkpoint iteration_0003 is whole" in ppo_command.how_to_go_on(tmp_path / "out")
    assert ppo_command.how_to_go_on(tmp_path / "new").startswith("interrupted before anything was written")


def test_a_measure_says_of_its_target_all_that_changes_what_is_drawn() -> None:
    drawn = {"sampler_sigmas": "1.0,0.5", "pose_clip": "true", "window": "61", "a_later_fact": "x"}
    other = {"threads": "2", "torch": "2.13.0", "diffusers": "0.42", "device_class": "cpu-x", "judge": "reward_model"}
    known = {"weights_sha256": "a" * 64, "reward_provenance": "d" * 64}
    contract = adjust_bottle("world_model", "bwm", {**drawn, **other, **known})
    assert target_identity(contract) == {
        "target_weights_sha256": "a" * 64,
        "target_provenance": fingerprint(contract.provenance),
        "reward_provenance": "d" * 64,
        "interface": fingerprint(contract.interface),
        "target_drawn": drawn,
    }
