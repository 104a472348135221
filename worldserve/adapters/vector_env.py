"""Many episodes at a time as a `gymnasium.vector.VectorEnv`, with each of Gymnasium's three autoreset modes.

    env = RemoteVectorEnv(["127.0.0.1:50051", "127.0.0.1:50061"], 16, states, autoreset_mode=AutoresetMode.SAME_STEP)

The server never resets by itself; the modes are this client's (Gymnasium's documentation of `AutoresetMode`):

- NEXT_STEP: the step after an episode's end ignores that environment's action and returns the next episode's first
  observation, reward 0.
- SAME_STEP: the step that ends an episode returns the next episode's first observation; the ended one's last
  observation and info are `info["final_obs"]` and `info["final_info"]`.
- DISABLED: the caller resets by `reset(options={"reset_mask": mask})`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from worldserve.adapters.gymnasium_env import action_space, observation_space, reset_info, start_of, step_info
from worldserve.adapters.slots import EpisodeSlots, NoEpisodeError
from worldserve.contract import Interface
from worldserve.messages import ResetReply, StepReply

Batch = dict[str, NDArray[Any]]


class RemoteVectorEnv(VectorEnv[Batch, NDArray[np.float32], NDArray[Any]]):
    """`num_envs` episodes side by side, one call a server and step.

    Environment i lives in server i modulo their number. Its starts and noise seeds come from its own generator, made of
    `seed` (or of `reset(seed=...)`) and i, so that they depend neither on the servers nor on the other environments.

    Args:
        targets: HOST:PORT of servers, or one of them; all of one interface.
        num_envs: how many.
        initial_states: ids to start from.
        seed: of the generators until the first `reset(seed=...)`.
        autoreset_mode: what happens at an end.
        interface: what the caller was built for; None takes the first server's own.
        timeout_s: deadline of a call, retries included.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 -- Gymnasium's own form

    def __init__(
        self,
        targets: str | Sequence[str],
        num_envs: int,
        initial_states: Sequence[str],
        seed: int = 0,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
        *,
        interface: Interface | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._slots = EpisodeSlots(targets, num_envs, initial_states, seed, interface=interface, timeout_s=timeout_s)
        self.interface, self.num_envs = self._slots.interface, num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        observation: Any = observation_space(self.interface)
        self.single_observation_space = observation
        self.single_action_space = action_space(self.interface)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._frames = np.zeros((num_envs, *observation["frame"].shape), np.uint8)
        self._states = np.zeros((num_envs, *observation["proprioception"].shape), np.float32)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Batch, dict[str, Any]]:
        """Opens episodes everywhere, or where `options["reset_mask"]`, bool (num_envs,), is true.

        Args:
            seed: environment i's generator is made of seed + i, or of the i-th of a sequence where that is a number.
            options: `reset_mask`, and `initial_state_id` and `noise_seed` for all that are reset.
        """
        chosen = dict(options or {})
        mask = _mask(chosen.pop("reset_mask", None), self.num_envs)
        start = start_of(chosen)
        if seed is not None:
            seeds = (
                [seed + number for number in range(self.num_envs)] if isinstance(seed, int | np.integer) else list(seed)
            )
            if len(seeds) != self.num_envs:
                raise ValueError(f"seed: expected {self.num_envs} seeds, one an environment; got {len(seeds)}")
            given = [(slot, value) for slot, value in enumerate(seeds) if value is not None and mask[slot]]
            self._slots.seed([value for _, value in given], [slot for slot, _ in given])
        slots = [int(slot) for slot in np.flatnonzero(mask)]
        infos: dict[str, Any] = {}
        for slot, reply in zip(slots, self._slots.reset(slots, [start] * len(slots)), strict=True):
            infos = self._opened(slot, reply, infos)
        return self._observations(), infos

    def step(
        self, actions: NDArray[np.float32]
    ) -> tuple[Batch, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Runs a chunk everywhere, float32 (num_envs, chunk_actions, dimensions).

        Raises:
            NoEpisodeError: before the first reset; after an end with DISABLED.
        """
        if actions.shape != self.action_space.shape:
            raise ValueError(f"actions: expected shape {self.action_space.shape}; got {actions.shape}")
        ended = [slot for slot in range(self.num_envs) if not self._slots.is_running(slot)]
        if ended and (self.autoreset_mode is not AutoresetMode.NEXT_STEP or not self._slots.was_opened(ended)):
            raise NoEpisodeError(
                f"environments {ended}: expected running episodes; got none, or ended ones. "
                "Call reset(), with options={'reset_mask': mask} for some of them."
            )
        infos: dict[str, Any] = {}
        rewards = np.zeros(self.num_envs, np.float64)
        terminated, truncated = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        running = [slot for slot in range(self.num_envs) if slot not in ended]
        replies = self._slots.step(running, actions[running]) if running else []
        for slot, reply in zip(running, replies, strict=True):
            infos = self._moved(slot, reply, infos)
            rewards[slot] = reply.rewards.sum(dtype=np.float64)
            terminated[slot], truncated[slot] = reply.terminated, reply.truncated
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            done = [int(slot) for slot in np.flatnonzero(terminated | truncated)]
            infos = self._with_final(done, dict(zip(running, replies)), infos)
            ended = done
        for slot, opened in zip(ended, self._slots.reset(ended) if ended else [], strict=True):
            infos = self._opened(slot, opened, infos)
        return self._observations(), rewards, terminated, truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the episodes and the channels."""
        self._slots.close()

    def _with_final(self, done: Sequence[int], replies: dict[int, StepReply], infos: dict[str, Any]) -> dict[str, Any]:
        """Moves what ended episodes said under `final_obs` and `final_info`, as Gymnasium's own vector envs do."""
        if not done:
            return infos
        kept: dict[str, Any] = {}
        for slot, reply in replies.items():
            if slot in done:
                final = {"frame": self._frames[slot].copy(), "proprioception": self._states[slot].copy()}
                kept = self._add_info(kept, {"final_obs": final, "final_info": step_info(reply)}, slot)
            else:
                kept = self._add_info(kept, step_info(reply), slot)
        return kept

    def _opened(self, slot: int, reply: ResetReply, infos: dict[str, Any]) -> dict[str, Any]:
        self._frames[slot], self._states[slot] = reply.frame, reply.proprioception
        return dict(self._add_info(infos, reset_info(reply), slot))

    def _moved(self, slot: int, reply: StepReply, infos: dict[str, Any]) -> dict[str, Any]:
        self._frames[slot], self._states[slot] = reply.frames[-1], reply.proprioception
        return dict(self._add_info(infos, step_info(reply), slot))

    def _observations(self) -> Batch:
        return {"frame": self._frames.copy(), "proprioception": self._states.copy()}


def _mask(given: Any, count: int) -> NDArray[np.bool_]:
    if given is None:
        return np.ones(count, np.bool_)
    mask = np.asarray(given)
    if mask.dtype != np.bool_ or mask.shape != (count,) or not mask.any():
        raise ValueError(
            f"options['reset_mask']: expected bool ({count},), true somewhere; got {mask.dtype} {mask.shape}"
        )
    return mask.astype(np.bool_)
