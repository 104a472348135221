"""Stable-Baselines3's own checker takes RemoteEnv. That its PPO learns over RemoteVecEnv: tests/examples."""

from __future__ import annotations

import numpy as np
import pytest

from tests.worldserve.adapters.conftest import STATES
from worldserve.serving import RunningServer

pytest.importorskip("gymnasium")
pytest.importorskip("stable_baselines3", reason="pip install '.[stable-baselines3]'")
from stable_baselines3.common.env_checker import check_env

from worldserve.adapters.gymnasium_env import RemoteEnv
from worldserve.adapters.stable_baselines3 import RemoteVecEnv


def test_stable_baselines3s_checker_takes_the_environment(server: RunningServer) -> None:
    env = RemoteEnv(server.address, STATES)
    check_env(env, warn=False)
    env.close()


def test_an_end_gives_the_last_observation_and_its_info(server: RunningServer) -> None:
    env = RemoteVecEnv(server.address, 2, STATES[:1])
    env.seed(3)
    assert env.reset()["proprioception"].tolist() == [[0.0], [0.0]]
    actions = np.array([np.full((2, 1), 0.643), np.full((2, 1), -1.0)], np.float32)
    _, rewards, dones, infos = env.step(actions)
    assert (rewards.tolist(), dones.tolist()) == ([0.0, 0.0], [False, False])
    assert "terminal_observation" not in infos[0]
    observation, rewards, dones, infos = env.step(actions)
    assert (rewards.tolist(), dones.tolist()) == ([1.0, 0.0], [True, True])
    assert observation["proprioception"].tolist() == [[0.0], [0.0]]
    assert infos[0]["terminal_observation"]["proprioception"] == pytest.approx([0.643])
    assert [(info["success"], info["TimeLimit.truncated"]) for info in infos] == [(True, False), (False, False)]
    assert infos[0]["initial_state_id"] == STATES[0]  # of the episode that follows
    env.close()
