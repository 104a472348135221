"""A batched `torchrl.envs.EnvBase`: one tensordict a step, one call a server.

env = RemoteTorchRLEnv("127.0.0.1:50051", 16, states)
rollout = env.rollout(4, break_when_any_done=False)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from worldserve.adapters.gymnasium_env import action_space, observation_space
from worldserve.adapters.slots import EpisodeSlots
from worldserve.contract import Interface


class RemoteTorchRLEnv(EnvBase):
    """`num_envs` episodes side by side, batch size (num_envs,).

    Keys: `pixels` uint8 (n, height, width, 3), `proprioception` float32 (n, dimensions), `action` float32
    (n, chunk_actions, dimensions), `reward` float32 (n, 1), the sum over the chunk; `success` bool (n, 1), the ground
    truth or else the verdict at the end, false where neither is known. Nothing resets by itself: TorchRL's
    rollouts and collectors reset by the mask `_reset`, which leaves the others as they are.

    Args:
        targets, num_envs, initial_states, seed, interface, timeout_s: as of `RemoteVectorEnv`.
        device: where tensors are put.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        num_envs: int,
        initial_states: Sequence[str],
        seed: int = 0,
        *,
        interface: Interface | None = None,
        timeout_s: float = 600.0,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size([num_envs]))
        self._slots = EpisodeSlots(targets, num_envs, initial_states, seed, interface=interface, timeout_s=timeout_s)
        self.is_closed = False  # EnvBase takes an environment for closed until it is told
        self.interface = self._slots.interface
        observation: Any = observation_space(self.interface)
        action: Any = action_space(self.interface)
        self.observation_spec = Composite(
            pixels=Bounded(0, 255, (num_envs, *observation["frame"].shape), device, torch.uint8),
            proprioception=_bounded(observation["proprioception"], num_envs, device),
            success=Binary(1, (num_envs, 1), device, torch.bool),
            shape=(num_envs,),
        )
        self.action_spec = _bounded(action, num_envs, device)
        self.reward_spec = Unbounded((num_envs, 1), device, torch.float32)
        flag = Binary(1, (num_envs, 1), device, torch.bool)
        self.done_spec = Composite(
            done=flag.clone(), terminated=flag.clone(), truncated=flag.clone(), shape=(num_envs,)
        )
        self._frames = np.zeros((num_envs, *observation["frame"].shape), np.uint8)
        self._states = np.zeros((num_envs, *observation["proprioception"].shape), np.float32)
        self._success, self._terminated, self._truncated = (np.zeros((num_envs, 1), np.bool_) for _ in range(3))

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        slots = list(range(self._slots.count))
        if mask is not None:
            slots = [slot for slot in slots if bool(mask.reshape(-1)[slot])]
        for slot, reply in zip(slots, self._slots.reset(slots), strict=True):
            self._frames[slot], self._states[slot] = reply.frame, reply.proprioception
            self._success[slot] = self._terminated[slot] = self._truncated[slot] = False
        return self._tensors()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        actions = tensordict.get("action").detach().cpu().numpy()
        slots = list(range(self._slots.count))
        rewards = np.zeros((len(slots), 1), np.float32)
        for slot, reply in zip(slots, self._slots.step(slots, actions), strict=True):
            self._frames[slot], self._states[slot] = reply.frames[-1], reply.proprioception
            self._terminated[slot], self._truncated[slot] = reply.terminated, reply.truncated
            judged = None if reply.verdict is None else reply.verdict.success
            self._success[slot] = bool(judged if reply.success is None else reply.success)
            rewards[slot] = reply.rewards.sum(dtype=np.float64)
        result = self._tensors()
        result.set("reward", torch.from_numpy(rewards).to(self.device))
        return result

    def _set_seed(self, seed: int | None) -> None:
        """Environment i's generator is made of seed + i; its starts and noise seeds come from there."""
        if seed is not None:
            self._slots.seed([seed + slot for slot in range(self._slots.count)])

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the episodes and the channels."""
        self._slots.close()
        super().close(raise_if_closed=raise_if_closed)

    def _tensors(self) -> TensorDict:
        values: dict[str, np.ndarray[Any, Any]] = {
            "pixels": self._frames,
            "proprioception": self._states,
            "success": self._success,
            "terminated": self._terminated,
            "truncated": self._truncated,
            "done": self._terminated | self._truncated,
        }
        tensors = {name: torch.from_numpy(value.copy()) for name, value in values.items()}
        return TensorDict(tensors, batch_size=self.batch_size, device=self.device)


def _bounded(space: Any, count: int, device: str | torch.device) -> Any:
    low, high = (np.broadcast_to(limit, (count, *space.shape)).copy() for limit in (space.low, space.high))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return Unbounded((count, *space.shape), device, torch.float32)
    return Bounded(torch.from_numpy(low), torch.from_numpy(high), (count, *space.shape), device, torch.float32)
