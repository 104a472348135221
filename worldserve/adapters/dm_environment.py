"""One episode at a time as a `dm_env.Environment`: a step is a chunk of the contract.

env = RemoteEnvironment("127.0.0.1:50051", ["adjust_bottle/train/0000"])
timestep = env.reset()
while not timestep.last():
    timestep = env.step(policy(timestep.observation))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dm_env
import numpy as np
from dm_env import specs
from numpy.typing import NDArray

from worldserve.adapters.gymnasium_env import action_space, observation_space, reset_info, step_info
from worldserve.adapters.slots import EpisodeSlots
from worldserve.contract import Interface


class RemoteEnvironment(dm_env.Environment):
    """A simulator or a world model.

    Observations are `frame` uint8 (height, width, 3) and `proprioception` float32 (dimensions,); an action is a chunk,
    float32 (chunk_actions, dimensions); the reward is the chunk's sum. The discount of a last step is 0 where the
    contract terminates and 1 where it truncates. As dm_env has it, a step of an environment that was never reset, or
    whose episode has ended, resets it and ignores the action. `info` has the rest of the last reply.

    Args:
        target, initial_states, seed, interface, timeout_s: as of `RemoteVectorEnv`.
    """

    def __init__(
        self,
        target: str,
        initial_states: Sequence[str],
        seed: int = 0,
        *,
        interface: Interface | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._slots = EpisodeSlots(target, 1, initial_states, seed, interface=interface, timeout_s=timeout_s)
        self.interface = self._slots.interface
        self.info: dict[str, Any] = {}

    def reset(self) -> dm_env.TimeStep:
        """Opens an episode, and closes the one before."""
        [reply] = self._slots.reset([0])
        self.info = reset_info(reply)
        return dm_env.restart({"frame": reply.frame, "proprioception": reply.proprioception})

    def step(self, action: NDArray[np.float32]) -> dm_env.TimeStep:
        """Runs a chunk."""
        if not self._slots.is_running(0):
            return self.reset()
        [reply] = self._slots.step([0], np.asarray(action)[None])
        self.info = step_info(reply)
        observation = {"frame": reply.frames[-1], "proprioception": reply.proprioception}
        reward = float(reply.rewards.sum(dtype=np.float64))
        if reply.terminated:
            return dm_env.termination(reward, observation)
        return dm_env.truncation(reward, observation) if reply.truncated else dm_env.transition(reward, observation)

    def observation_spec(self) -> dict[str, specs.Array]:
        """Specs of `frame` and `proprioception`."""
        space = observation_space(self.interface)
        return {name: _spec(space[name], name) for name in ("frame", "proprioception")}

    def action_spec(self) -> specs.BoundedArray:
        """Spec of a chunk."""
        return _spec(action_space(self.interface), "action")

    def close(self) -> None:
        """Closes the episode and the channel."""
        self._slots.close()


def _spec(space: Any, name: str) -> specs.BoundedArray:
    return specs.BoundedArray(space.shape, space.dtype, space.low, space.high, name)
