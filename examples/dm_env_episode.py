"""An episode that holds still through dm_env.

python -m examples.dm_env_episode 127.0.0.1:50051 adjust_bottle/train/0000
"""

import sys

import numpy as np

from worldserve.adapters.dm_environment import RemoteEnvironment


def main(argv):
    environment = RemoteEnvironment(argv[0], argv[1:])
    timestep = environment.reset()
    print(environment.info["instruction"])
    while not timestep.last():
        held = np.broadcast_to(timestep.observation["proprioception"], environment.action_spec().shape)
        timestep = environment.step(held)
        print(f"{timestep.step_type.name} reward {timestep.reward:g} discount {timestep.discount:g}")
    environment.close()


if __name__ == "__main__":
    main(sys.argv[1:])
