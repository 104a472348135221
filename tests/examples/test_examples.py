"""Every example runs against the example's own environment or world model, and is as short as it says."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from examples.own_environment import GOALS, Reach, draw
from examples.own_world_model import OwnWorldModel
from worldserve.client import EnvironmentClient, raise_for_errors
from worldserve.messages import FrameSelection, ResetItem, StepItem
from worldserve.serving import RunningServer, ServerSettings, start_environment_server

EXAMPLES = Path(__file__).parents[2] / "examples"
STATE = "reach/train/0006"  # its goal is 0.643
INTERFACE = Reach.contract.interface


@pytest.fixture
def environment() -> Iterator[RunningServer]:
    running = start_environment_server(Reach(), None, ServerSettings())
    yield running
    running.stop(0)


@pytest.fixture
def world_model() -> Iterator[RunningServer]:
    running = start_environment_server(OwnWorldModel(), None, ServerSettings())
    yield running
    running.stop(0)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_has_fewer_than_60_lines_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert f"python -m examples.{path.stem} " in text


def test_the_own_environment_keeps_the_contract(environment: RunningServer) -> None:
    with EnvironmentClient(environment.address, interface=INTERFACE) as client:
        raise_for_errors(client.reset([ResetItem("a", STATE, 1), ResetItem("b", STATE, 2)]))
        [unknown] = client.reset([ResetItem("c", "reach/train/9999")])
        assert unknown.reason == "INITIAL_STATE_UNKNOWN"
        for index in range(2):
            actions = [np.full((2, 1), target, np.float32) for target in (0.643, 5.0)]
            items = [StepItem(name, index, chunk, FrameSelection.every(1)) for name, chunk in zip("ab", actions)]
            replies = raise_for_errors(client.step(items))
    assert [reply.success for reply in replies] == [True, False]
    assert [reply.clipped_count for reply in replies] == [0, 2]
    assert [reply.rewards.tolist() for reply in replies] == [[0, 1], [0, 0]]
    np.testing.assert_array_equal(replies[1].frames, draw(np.array([1.0, 1.0]), GOALS[STATE]))


def test_the_own_world_models_frames_depend_on_seed_and_actions_alone(world_model: RunningServer) -> None:
    def frames(names: list[str], seeds: list[int]) -> dict[str, bytes]:
        with EnvironmentClient(world_model.address, interface=INTERFACE) as client:
            raise_for_errors(client.reset([ResetItem(name, STATE, seed) for name, seed in zip(names, seeds)]))
            chunk = np.full((2, 1), 0.3, np.float32)
            replies = raise_for_errors(
                client.step([StepItem(name, 0, chunk, FrameSelection.every(1)) for name in names])
            )
            assert [reply.success for reply in replies] == [None] * len(names)
            client.close_episodes(names)
        return {reply.episode_id: reply.frames.tobytes() for reply in replies}

    together, alone = frames(["a", "b"], [5, 6]), frames(["c"], [5])
    assert together["a"] == alone["c"]
    assert together["a"] != together["b"]


RUN_BY = {
    "gymnasium_env": ("gymnasium", "ended by its limit; success: "),
    "torchrl_rollout": ("torchrl", "rollout (4, 4), frames (36, 36, 3)\n8 episodes ended, "),
    "vector_env": ("gymnasium", "16 episodes, mean return 0.000"),
    "dm_env_episode": ("dm_env", "reach the green line\nMID reward 0 discount 1\nLAST reward 0 discount 0\n"),
    "rlinf_env": ("torch", "ended [True, True, True, True]\n{'success_once': [False, False, False, False]"),
    "rlinf_backend": ("torch", "frames (2, 3, 2, 36, 36) in [-1.00, 1.00]"),
}


@pytest.mark.parametrize("name", RUN_BY)
def test_an_example_of_an_environment_runs(
    name: str, environment: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    library, expected = RUN_BY[name]
    pytest.importorskip("gymnasium")
    pytest.importorskip(library)
    importlib.import_module(f"examples.{name}").main([environment.address, STATE])
    assert expected in capsys.readouterr().out
    with EnvironmentClient(environment.address) as client:
        assert client.info().live == 0


def test_ppo_of_stable_baselines3_learns(environment: RunningServer) -> None:
    pytest.importorskip("stable_baselines3", reason="pip install '.[stable-baselines3]'")
    from examples.stable_baselines3_ppo import main

    before, after = main([environment.address, STATE, "--steps", "4096"])
    assert before < 0.5
    assert after > before + 0.3


def test_the_client_of_dm_env_rpc_runs(environment: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("dm_env_rpc", reason="pip install '.[dm-env]'")
    from examples.dm_env_rpc_client import main
    from worldserve.adapters.dm_env_rpc_bridge import DmEnvRpcServicer, start_dm_env_rpc_server

    bridge, address = start_dm_env_rpc_server(DmEnvRpcServicer(environment.address, [STATE]), "127.0.0.1:0")
    main([address])
    bridge.stop(5).wait()
    assert capsys.readouterr().out.endswith("MID reward 0 discount 1\nLAST reward 0 discount 0\n")


def test_the_client_of_worldarena_runs(
    world_model: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image")
    from examples.worldarena_predict import main
    from worldserve.adapters.worldarena import ContractPredictor
    from worldserve.adapters.worldarena_http import start_worldarena_server

    image.fromarray(draw(np.zeros(1), GOALS[STATE])[0]).save(tmp_path / "first.png")
    server = start_worldarena_server(lambda: ContractPredictor(world_model.address, [STATE]), "127.0.0.1:0")
    assert server.service.wait_until_ready(60)
    main([f"http://{server.address}", str(tmp_path / "first.png"), str(tmp_path / "out.gif")])
    server.stop()
    assert "4 frames of (36, 36)" in capsys.readouterr().out
    with image.open(tmp_path / "out.gif") as gif:
        assert gif.format == "GIF"
