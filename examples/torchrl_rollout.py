"""Advantages of a batch of episodes through TorchRL.

python -m examples.torchrl_rollout 127.0.0.1:50051 adjust_bottle/train/0000 adjust_bottle/train/0001
"""

import sys

import torch
from torchrl.objectives.value.functional import generalized_advantage_estimate

from worldserve.adapters.torchrl_env import RemoteTorchRLEnv


def main(argv):
    env = RemoteTorchRLEnv(argv[0], 4, argv[1:])
    env.set_seed(0)
    chunks = env.interface.chunks_per_episode
    rollout = env.rollout(2 * chunks, break_when_any_done=False)  # uniform random actions, two episodes a slot
    following = rollout["next"]
    values = torch.zeros_like(following["reward"])  # a critic's, where there is one
    advantages, _ = generalized_advantage_estimate(
        0.99, 0.95, values, values, following["reward"], following["done"], following["terminated"]
    )
    print(f"rollout {tuple(rollout.batch_size)}, frames {tuple(rollout['pixels'].shape[2:])}")
    print(
        f"{int(following['done'].sum())} episodes ended, {int(following['success'][following['done']].sum())} succeeded"
    )
    print(f"advantages {tuple(advantages.shape)}, mean {advantages.mean():.3f}")
    env.close()


if __name__ == "__main__":
    main(sys.argv[1:])
