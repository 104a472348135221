"""Chunks of a GRPO group through the environment class that RLinf's worker gets from RLINF_EXT_MODULE.

python -m examples.rlinf_env 127.0.0.1:50051 adjust_bottle/train/0000 adjust_bottle/train/0001

In RLinf: export RLINF_EXT_MODULE=worldserve.adapters.rlinf_env, and in the configuration of the environment
env_type: robotwin, with the settings below.
"""

import sys
from types import SimpleNamespace

import torch

from worldserve.adapters.rlinf_env import RemoteRLinfEnv
from worldserve.client import EnvironmentClient


class Settings(SimpleNamespace):  # RLinf gives an OmegaConf node
    def get(self, name, default=None):
        return getattr(self, name, default)


def main(argv):
    with EnvironmentClient(argv[0]) as client:
        interface = client.get_contract().interface
    settings = Settings(
        targets=argv[0], initial_states=argv[1:], seed=0, group_size=2, auto_reset=True,
        max_episode_steps=interface.termination.limit_actions,
    )  # fmt: skip
    env = RemoteRLinfEnv(settings, num_envs=4, seed_offset=0, total_num_processes=1)
    observation, _ = env.reset()
    for _ in range(interface.chunks_per_episode):
        actions = observation["states"][:, None].expand(-1, interface.timing.chunk_actions, -1)
        [observation], rewards, terminations, truncations, [infos] = env.chunk_step(actions)
        print(f"rewards {rewards.sum(1).tolist()}, ended {torch.logical_or(terminations, truncations)[:, -1].tolist()}")
    print({name: value.tolist() for name, value in infos["episode"].items()})
    env.close()


if __name__ == "__main__":
    main(sys.argv[1:])
