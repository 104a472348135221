"""An environment class for RLinf: its `EnvWorker` steps a server as it steps its own RoboTwin environment.

RLinf has no open list of environments, but loads the module that RLINF_EXT_MODULE names in every worker and calls its
`register()`:

    export RLINF_EXT_MODULE=worldserve.adapters.rlinf_env

Then `env_type: robotwin` with `targets` and `initial_states` in the environment's configuration is this class.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from worldserve.adapters.slots import EpisodeSlots
from worldserve.messages import ResetReply, StepReply


def register() -> None:
    """Makes RLinf's environment type `robotwin` this class, in this process."""
    from rlinf.envs.robotwin import robotwin_env

    robotwin_env.RoboTwinEnv = RemoteRLinfEnv


class RemoteRLinfEnv(gymnasium.Env[Any, Any]):
    """`num_envs` episodes in servers, in RLinf's shapes.

    Observations: `main_images` uint8 (n, height, width, 3), `wrist_images` None, `states` float32 (n, dimensions),
    `task_descriptions`, n strings. Rewards are those of the contract, by action; a success is `infos["success"]` and
    ends nothing by itself. `group_size` neighbours start from one state with noise seeds of their own (GRPO). Only
    ended episodes are reset, and their figures are in `infos["final_info"]["episode"]`.

    Args:
        cfg: `targets`, `initial_states`, `seed`, `group_size`, `max_episode_steps`, `auto_reset`,
            `use_fixed_reset_state_ids`, `ignore_terminations`, by attribute and `get`, as OmegaConf gives them.
        num_envs: how many.
        seed_offset: added to the seed; a worker's own.
        total_num_processes, worker_info: RLinf's; unused.
        record_metrics: whether `infos["episode"]` is kept.

    Raises:
        ValueError: settings that the contract contradicts.
    """

    def __init__(
        self,
        cfg: Any,
        num_envs: int,
        seed_offset: int,
        total_num_processes: int,
        worker_info: Any = None,
        record_metrics: bool = True,
    ) -> None:
        self.cfg, self.num_envs, self.record_metrics = cfg, num_envs, record_metrics
        self.group_size = int(cfg.group_size)
        if num_envs % self.group_size:
            raise ValueError(f"num_envs: expected a multiple of group_size {self.group_size}; got {num_envs}")
        self.seed, self.auto_reset = int(cfg.seed) + int(seed_offset), bool(cfg.auto_reset)
        self.ignore_terminations = bool(cfg.get("ignore_terminations", False))
        self.is_start = True
        self.device = torch.device("cpu")
        targets = cfg.targets
        self._slots = EpisodeSlots(
            targets if isinstance(targets, str) else list(targets), num_envs, list(cfg.initial_states), self.seed
        )
        limit = self._slots.interface.termination.limit_actions
        if int(cfg.max_episode_steps) != limit:
            self._slots.close()
            raise ValueError(
                f"max_episode_steps: expected {limit}, the contract's termination.limit_actions; got "
                f"{cfg.max_episode_steps}. Change the configuration: the server ends episodes."
            )
        self._generator = np.random.default_rng(self.seed)
        self.update_reset_state_ids()
        height, width = self._slots.interface.observation.height, self._slots.interface.observation.width
        self._images = torch.zeros((num_envs, height, width, 3), dtype=torch.uint8)
        self._states = torch.zeros((num_envs, self._slots.interface.action_dimensions))
        self._instructions = [""] * num_envs
        self._success = torch.zeros(num_envs, dtype=torch.bool)
        self._returns, self._lengths = torch.zeros(num_envs), torch.zeros(num_envs)

    @property
    def elapsed_steps(self) -> Tensor:
        """Actions of the running episodes, float32 (n,)."""
        return self._lengths.clone()

    def update_reset_state_ids(self, env_idx: Any = None) -> None:
        """Draws which state each group starts from next; with `use_fixed_reset_state_ids` all later resets keep it."""
        drawn = self._generator.integers(len(self._slots.initial_states), size=self.num_envs // self.group_size)
        self.reset_state_ids = torch.from_numpy(np.repeat(drawn, self.group_size))

    def reset(self, *, env_idx: Any = None, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Opens episodes in `env_idx` (all by default); the others go on."""
        self.is_start = False
        slots = list(range(self.num_envs)) if env_idx is None else [int(slot) for slot in env_idx]
        states = self._slots.initial_states
        # A group shares its first state; a slot that restarts within a rollout draws its own, unless they are fixed.
        fixed = env_idx is None or bool(self.cfg.get("use_fixed_reset_state_ids", False))
        starts = [(states[int(self.reset_state_ids[slot])] if fixed else None, None) for slot in slots]
        for slot, reply in zip(slots, self._slots.reset(slots, starts), strict=True):
            self._open(slot, reply)
        return self._observation(), {}

    def chunk_step(
        self, chunk_actions: Tensor | np.ndarray[Any, Any]
    ) -> tuple[list[dict[str, Any]], Tensor, Tensor, Tensor, list[dict[str, Any]]]:
        """Runs a chunk, (n, chunk_actions, dimensions).

        Returns:
            Observations and infos, each in a list of one; rewards float32, terminations and truncations bool, each
            (n, chunk_actions) with the flags at the last action.
        """
        values = chunk_actions.detach().cpu().numpy() if isinstance(chunk_actions, Tensor) else chunk_actions
        slots = range(self.num_envs)
        replies = self._slots.step(slots, values)
        rewards = torch.from_numpy(np.stack([reply.rewards for reply in replies]))
        terminations, truncations = (torch.zeros(rewards.shape, dtype=torch.bool) for _ in range(2))
        for slot, reply in zip(slots, replies, strict=True):
            self._move(slot, reply)
            terminations[slot, -1] = reply.terminated and not self.ignore_terminations
            truncations[slot, -1] = reply.truncated or (reply.terminated and self.ignore_terminations)
        infos: dict[str, Any] = {"success": self._success.clone()}
        if self.record_metrics:
            infos["episode"] = self._figures()
        observation = self._observation()
        done = (terminations | truncations)[:, -1]
        if self.auto_reset and bool(done.any()):
            final_observation, final_info = observation, infos
            observation, infos = self.reset(env_idx=torch.nonzero(done)[:, 0].tolist())
            infos |= {"final_observation": final_observation, "final_info": final_info}
            infos["success"] = final_info["success"]
            infos |= {"_final_observation": done, "_final_info": done, "_elapsed_steps": done}
            if self.record_metrics:
                infos["episode"] = final_info["episode"]
        return [observation], rewards, terminations, truncations, [infos]

    def step(self, actions: Any = None, auto_reset: bool = True) -> Any:
        """Raises NotImplementedError: the contract's step is a chunk, `chunk_step`."""
        raise NotImplementedError("step: a server runs whole chunks; call chunk_step")

    def offload(self, clear_cache: bool = True) -> None:
        """Closes the episodes at their servers, where what a worker could free lies; the next reset opens new ones."""
        self._slots.release(range(self.num_envs))

    def close(self) -> None:
        """Closes the episodes and the channels."""
        self._slots.close()

    def _open(self, slot: int, reply: ResetReply) -> None:
        self._show(slot, reply.frame, reply.proprioception)
        self._instructions[slot] = reply.instruction
        self._success[slot], self._returns[slot], self._lengths[slot] = False, 0.0, 0.0

    def _move(self, slot: int, reply: StepReply) -> None:
        self._show(slot, reply.frames[-1], reply.proprioception)
        judged = None if reply.verdict is None else reply.verdict.success
        self._success[slot] |= bool(judged if reply.success is None else reply.success)
        self._returns[slot] += float(reply.rewards.sum(dtype=np.float64))
        self._lengths[slot] = reply.elapsed_steps

    def _show(self, slot: int, frame: Any, state: Any) -> None:
        self._images[slot] = torch.from_numpy(np.array(frame))
        self._states[slot] = torch.from_numpy(np.array(state))

    def _figures(self) -> dict[str, Tensor]:
        return {
            "success_once": self._success.clone(),
            "return": self._returns.clone(),
            "episode_len": self._lengths.clone(),
            "reward": self._returns / self._lengths.clamp(min=1),
        }

    def _observation(self) -> dict[str, Any]:
        return {
            "main_images": self._images.clone(),
            "wrist_images": None,
            "states": self._states.clone(),
            "task_descriptions": list(self._instructions),
        }
