"""RemoteVectorEnv: the three autoreset modes, in tables of what each step returns, and several servers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.worldserve.adapters.conftest import STATES
from worldserve.client import EnvironmentClient
from worldserve.serving import RunningServer

pytest.importorskip("gymnasium")
from gymnasium.vector import AutoresetMode

from worldserve.adapters.slots import NoEpisodeError
from worldserve.adapters.vector_env import RemoteVectorEnv

GOAL = {"reach/train/0006": 0.643, "reach/train/0001": -0.643}


def chunks(env: RemoteVectorEnv, *targets: float) -> np.ndarray:
    """A chunk that holds each environment's target."""
    return np.array([np.full((2, 1), target) for target in targets], np.float32)


def make(server: RunningServer, mode: AutoresetMode, num_envs: int = 2) -> RemoteVectorEnv:
    return RemoteVectorEnv(server.address, num_envs, STATES, 0, mode, timeout_s=20)


def test_next_step_resets_in_the_step_after_the_end_and_ignores_its_action(server: RunningServer) -> None:
    with_next = make(server, AutoresetMode.NEXT_STEP)
    _, info = with_next.reset(seed=1, options={"initial_state_id": STATES[0]})
    assert list(info["initial_state_id"]) == [STATES[0]] * 2
    rows = [with_next.step(chunks(with_next, 0.643, -1.0)) for _ in range(3)]
    assert [row[1].tolist() for row in rows] == [[0, 0], [1, 0], [0, 0]]
    assert [row[2].tolist() for row in rows] == [[False, False], [True, True], [False, False]]
    # The third step is the reset: the finger is at 0 again, whatever the action said.
    assert rows[1][0]["proprioception"][:, 0].tolist() == pytest.approx([0.643, -1.0])
    assert rows[2][0]["proprioception"].tolist() == [[0.0], [0.0]]
    assert "initial_state_id" in rows[2][4]
    assert with_next.step(chunks(with_next, 0.5, 0.5))[0]["proprioception"].tolist() == [[0.5], [0.5]]
    with_next.close()


def test_same_step_returns_the_next_start_and_keeps_the_last_observation(server: RunningServer) -> None:
    env = make(server, AutoresetMode.SAME_STEP)
    env.reset(seed=1, options={"initial_state_id": STATES[0]})
    env.step(chunks(env, 0.643, -1.0))
    observation, rewards, terminated, truncated, info = env.step(chunks(env, 0.643, -1.0))
    assert rewards.tolist() == [1.0, 0.0]
    assert (terminated.tolist(), truncated.tolist()) == ([True, True], [False, False])
    assert observation["proprioception"].tolist() == [[0.0], [0.0]]
    finals = [final["proprioception"][0] for final in info["final_obs"]]
    assert finals == pytest.approx([0.643, -1.0])
    assert info["final_info"]["success"].tolist() == [True, False]
    assert "success" not in info
    assert env.step(chunks(env, 0.5, 0.5))[0]["proprioception"].tolist() == [[0.5], [0.5]]
    env.close()


def test_disabled_resets_what_the_mask_says_and_refuses_a_step_after_an_end(server: RunningServer) -> None:
    env = make(server, AutoresetMode.DISABLED)
    env.reset(seed=1)
    for _ in range(2):
        env.step(chunks(env, 0.1, 0.2))
    with pytest.raises(NoEpisodeError, match=r"environments \[0, 1\].*reset_mask"):
        env.step(chunks(env, 0.1, 0.2))
    observation, info = env.reset(options={"reset_mask": np.array([False, True])})
    assert observation["proprioception"][:, 0].tolist() == pytest.approx([0.1, 0.0])
    assert info["_noise_seed"].tolist() == [False, True]
    with pytest.raises(NoEpisodeError, match=r"environments \[0\]"):
        env.step(chunks(env, 0.1, 0.2))
    env.close()


def test_a_step_before_the_first_reset_is_refused_in_every_mode(server: RunningServer) -> None:
    for mode in AutoresetMode:
        env = make(server, mode)
        with pytest.raises(NoEpisodeError, match="reset"):
            env.step(chunks(env, 0.0, 0.0))
        env.close()


def test_starts_depend_neither_on_the_servers_nor_on_how_many_environments_there_are(
    server: RunningServer, second_server: RunningServer
) -> None:
    def starts(targets: list[str], num_envs: int) -> list[tuple[str, int]]:
        env = RemoteVectorEnv(targets, num_envs, STATES, autoreset_mode=AutoresetMode.DISABLED)
        infos = [env.reset(seed=7)[1], env.reset()[1]]
        env.close()
        return [
            (str(info["initial_state_id"][slot]), int(info["noise_seed"][slot])) for info in infos for slot in (0, 1, 2)
        ]

    one = starts([server.address], 3)
    assert one == starts([server.address, second_server.address], 5)
    assert len({seed for _, seed in one}) == 6


def test_each_environment_lives_in_its_own_server(server: RunningServer, second_server: RunningServer) -> None:
    env = RemoteVectorEnv([server.address, second_server.address], 5, STATES)
    env.reset(seed=0)
    live = []
    for address in (server.address, second_server.address):
        with EnvironmentClient(address) as client:
            live.append(client.info().live)
    assert live == [3, 2]
    observation = env.step(np.linspace(-0.5, 0.5, 5, dtype=np.float32)[:, None, None].repeat(2, 1))[0]
    assert observation["proprioception"][:, 0].tolist() == pytest.approx([-0.5, -0.25, 0.0, 0.25, 0.5])
    env.close()


def test_gymnasiums_wrappers_take_it(server: RunningServer) -> None:
    from gymnasium.wrappers.vector import RecordEpisodeStatistics

    env = RecordEpisodeStatistics(make(server, AutoresetMode.NEXT_STEP))
    env.reset(seed=0, options={"initial_state_id": STATES[0]})
    env.step(chunks(env, 0.643, -1.0))
    *_, info = env.step(chunks(env, 0.643, -1.0))
    assert info["episode"]["r"].tolist() == [1.0, 0.0]
    assert info["episode"]["l"].tolist() == [2, 2]
    env.close()
