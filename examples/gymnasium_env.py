"""An episode of random actions through Gymnasium.

python -m examples.gymnasium_env 127.0.0.1:50051 adjust_bottle/train/0000 adjust_bottle/train/0001
"""

import sys

from worldserve.adapters.gymnasium_env import RemoteEnv


def main(argv):
    env = RemoteEnv(argv[0], argv[1:])
    observation, info = env.reset(seed=0)
    print(f"{info['initial_state_id']}: {info['instruction']}; frames {observation['frame'].shape}")
    env.action_space.seed(0)
    ended = False
    while not ended:
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        ended = terminated or truncated
        print(f"{info['elapsed_steps']} actions, {info['clipped_count']} numbers clipped, reward {reward:g}")
    print(f"ended by its {info['end_reason']}; success: {info.get('success', info.get('verdict_success'))}")
    env.close()


if __name__ == "__main__":
    main(sys.argv[1:])
