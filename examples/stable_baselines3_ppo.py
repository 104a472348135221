"""PPO of Stable-Baselines3 on proprioception alone. It learns the reach example from one state in a few seconds.

python -m examples.own_environment 127.0.0.1:50061 &
python -m examples.stable_baselines3_ppo 127.0.0.1:50061 reach/train/0006 --steps 8000
"""

import argparse

import numpy as np
from stable_baselines3 import PPO

from worldserve.adapters.stable_baselines3 import RemoteVecEnv


def success_rate(agent, env, episodes=64):
    observation, outcomes = env.reset(), []
    while len(outcomes) < episodes:
        observation, _, dones, infos = env.step(agent.predict(observation)[0])
        outcomes += [bool(info["success"]) for info, done in zip(infos, dones) if done]
    return np.mean(outcomes)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("states", nargs="+")
    parser.add_argument("--steps", type=int, default=8000)
    arguments = parser.parse_args(argv)
    env = RemoteVecEnv(arguments.target, 16, arguments.states, observe="proprioception")
    agent = PPO(
        "MlpPolicy", env, n_steps=16, batch_size=64, learning_rate=3e-3, seed=0,
        policy_kwargs={"net_arch": [16], "log_std_init": -0.5},
    )  # fmt: skip
    before = success_rate(agent, env)
    agent.learn(arguments.steps)
    after = success_rate(agent, env)
    print(f"success before {before:.2f}, after {arguments.steps} steps {after:.2f}")
    env.close()
    return before, after


if __name__ == "__main__":
    main()
