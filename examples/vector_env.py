"""Success of holding still, over many episodes side by side and several servers.

python -m examples.vector_env 127.0.0.1:50051,127.0.0.1:50061 adjust_bottle/train/0000 adjust_bottle/train/0001
"""

import sys

import numpy as np

from worldserve.adapters.vector_env import AutoresetMode, RemoteVectorEnv

EPISODES = 16


def main(argv):
    env = RemoteVectorEnv(argv[0].split(","), 4, argv[1:], autoreset_mode=AutoresetMode.SAME_STEP)
    observations, _ = env.reset(seed=0)
    chunk = env.single_action_space.shape[0]
    returns, outcomes = np.zeros(env.num_envs), []
    while len(outcomes) < EPISODES:
        actions = np.repeat(observations["proprioception"][:, None], chunk, axis=1)  # commanded: the last targets
        observations, rewards, terminated, truncated, _ = env.step(actions)
        returns += rewards
        ended = terminated | truncated
        outcomes += returns[ended].tolist()
        returns[ended] = 0
    print(f"{len(outcomes)} episodes, mean return {np.mean(outcomes):.3f}")
    env.close()


if __name__ == "__main__":
    main(sys.argv[1:])
