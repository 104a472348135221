"""A `VecEnv` of Stable-Baselines3 that asks a server once a step, however many environments it has.

    env = RemoteVecEnv("127.0.0.1:50051", 16, states)
    PPO("MultiInputPolicy", env).learn(100_000)

Single environments need nothing of this: `RemoteEnv` is a `gymnasium.Env`, which Stable-Baselines3 takes as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from worldserve.adapters.gymnasium_env import Observation, observation_space
from worldserve.adapters.vector_env import RemoteVectorEnv
from worldserve.contract import Interface


class RemoteVecEnv(VecEnv):
    """`num_envs` episodes side by side that are reset in the step that ends them, as Stable-Baselines3 expects.

    An ended episode's last observation is its info's `terminal_observation`; `TimeLimit.truncated` is true where the
    contract says that the limit truncates.

    Args:
        targets, num_envs, initial_states, seed, interface, timeout_s: as of `RemoteVectorEnv`.
        observe: keeps only this part of the observation, `proprioception` or `frame`, for policies that take an array;
            None keeps both.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        num_envs: int,
        initial_states: Sequence[str],
        seed: int = 0,
        *,
        observe: str | None = None,
        interface: Interface | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.render_mode = None
        self.vector = RemoteVectorEnv(
            targets, num_envs, initial_states, seed, AutoresetMode.SAME_STEP, interface=interface, timeout_s=timeout_s
        )
        space = observation_space(self.vector.interface)
        if observe is not None and observe not in space.spaces:
            self.vector.close()
            raise ValueError(f"observe: expected None or one of {', '.join(space.spaces)}; got {observe!r}")
        self._observe = observe
        self._actions: NDArray[np.float32] | None = None
        super().__init__(num_envs, space if observe is None else space[observe], self.vector.single_action_space)

    def reset(self) -> Any:
        """Opens episodes everywhere; `seed()` before it makes their generators anew."""
        seeds = [None if value is None else int(value) for value in self._seeds]
        options = dict(self._options[0]) if self._options and self._options[0] else None
        observation, infos = self.vector.reset(
            seed=seeds if any(value is not None for value in seeds) else None, options=options
        )
        self.reset_infos = [_of(infos, number) for number in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return self._part(observation)

    def step_async(self, actions: NDArray[np.float32]) -> None:
        """Keeps the chunks, float32 (num_envs, chunk_actions, dimensions), for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> Any:
        """Observations, rewards float32, dones and one info an environment."""
        if self._actions is None:
            raise RuntimeError("step_wait: expected step_async before; got no actions")
        actions, self._actions = self._actions, None
        observation, rewards, terminated, truncated, batched = self.vector.step(actions)
        infos = []
        for number in range(self.num_envs):
            info = _of(batched, number)
            if terminated[number] or truncated[number]:
                final: Observation = info.pop("final_obs")
                info |= info.pop("final_info")
                info["terminal_observation"] = final if self._observe is None else final[self._observe]
                info["TimeLimit.truncated"] = bool(truncated[number] and not terminated[number])
            infos.append(info)
        return self._part(observation), rewards.astype(np.float32), terminated | truncated, infos

    def close(self) -> None:
        """Closes the episodes and the channels."""
        self.vector.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The attribute of the whole, once an environment asked for: they share everything."""
        value = getattr(self, attr_name) if attr_name == "render_mode" else getattr(self.vector, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Raises AttributeError: the environments share everything."""
        raise AttributeError(f"{attr_name}: the environments of RemoteVecEnv share their settings; make another one")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Raises AttributeError: there is no object for each environment."""
        raise AttributeError(f"{method_name}: RemoteVecEnv has no object for each environment; call .vector")

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """False: nothing wraps a single environment."""
        return [False for _ in self._get_indices(indices)]

    def _part(self, observation: dict[str, Any]) -> Any:
        return observation if self._observe is None else observation[self._observe]


def _of(batched: dict[str, Any], number: int) -> dict[str, Any]:
    """One environment's info from Gymnasium's batched form, in which `_name` says who has `name`."""
    info: dict[str, Any] = {}
    for name, value in batched.items():
        if name.startswith("_"):
            continue
        has = batched.get(f"_{name}")
        if has is None or not has[number]:
            continue
        info[name] = _of(value, number) if isinstance(value, dict) else value[number]
    return info
