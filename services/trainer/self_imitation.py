"""Self-imitation: the flow-matching loss on the policy's own better-than-expected decisions.

Self-imitation learning (Oh et al. 2018, arXiv 1806.05635) adds to an actor-critic the loss
-log pi(a|s) max(R - V(s), 0) on past decisions. For a flow policy the flow-matching loss takes the place of -log pi,
and decisions are drawn with probability proportional to max(R - V, 0). PPO's density sees the noise of one denoise
step; this also learns from the initial noise, which decides most of what a chunk looks like.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.trainer.rollout import Rollout, make_observation

if TYPE_CHECKING:
    from services.trainer.policies import FlowPolicy


@dataclass
class Decisions:
    """The newest `capacity` better-than-expected decisions: images uint8 (n, H, W, 3), states float32 (n, 14), actions
    float32 (n, actions, 14), weights float32 (n,) = max(R - V, 0), and the instruction of each.
    """

    capacity: int
    images: NDArray[np.uint8] | None = None
    states: NDArray[np.float32] | None = None
    actions: NDArray[np.float32] | None = None
    weights: NDArray[np.float32] | None = None
    instructions: NDArray[np.str_] | None = None

    def __len__(self) -> int:
        return 0 if self.weights is None else len(self.weights)

    def add(self, rollout: Rollout, returns: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the decisions of `rollout` with returns above values, both (N * T,)."""
        advantage = (returns - values).clamp(min=0.0).numpy().astype(np.float32)
        rows = np.nonzero(advantage > 0.0)[0]
        horizon = rollout.rewards.shape[1]
        new: dict[str, NDArray[Any]] = {
            "images": rollout.images.reshape(-1, *rollout.images.shape[2:])[rows],
            "states": rollout.states.reshape(-1, rollout.states.shape[2])[rows],
            "actions": rollout.samples["actions"].flatten(0, 1).numpy()[rows],
            "weights": advantage[rows],
            "instructions": np.array([rollout.instructions[row // horizon] for row in rows]),
        }
        for name, value in new.items():
            old = getattr(self, name)
            setattr(self, name, (value if old is None else np.concatenate([old, value]))[-self.capacity :])

    def save(self, path: Path) -> None:
        """Write to an .npz file (no objects in it), atomically."""
        temporary = path.with_name(f".{path.name}.tmp.npz")
        arrays = {n: getattr(self, n) for n in ("images", "states", "actions", "weights", "instructions") if len(self)}
        np.savez_compressed(temporary, **arrays)
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                setattr(self, name, archive[name])


def imitate(
    policy: FlowPolicy,
    optimizer: torch.optim.Optimizer,
    decisions: Decisions,
    steps: int,
    batch_size: int,
    max_grad_norm: float,
    generator: np.random.Generator,
) -> dict[str, Any]:
    """`steps` optimiser steps of the flow-matching loss on decisions drawn by weight; returns metrics."""
    if len(decisions) == 0 or steps == 0:
        return {}
    assert decisions.weights is not None
    assert decisions.images is not None
    assert decisions.states is not None
    assert decisions.actions is not None
    assert decisions.instructions is not None
    probability = decisions.weights.astype(np.float64)
    probability /= probability.sum()
    noise = torch.Generator().manual_seed(int(generator.integers(2**62)))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    losses = []
    for _ in range(steps):
        rows = generator.choice(len(decisions), batch_size, p=probability)
        observation = make_observation(
            decisions.images[rows], decisions.states[rows], [str(text) for text in decisions.instructions[rows]]
        )
        loss = policy.flow_matching_loss(observation, torch.from_numpy(decisions.actions[rows]), noise, draws=2)
        if not bool(torch.isfinite(loss)):
            raise FloatingPointError(
                "self-imitation loss: expected a finite number. Lower self_imitation_learning_rate."
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"self_imitation/loss": float(np.mean(losses)), "self_imitation/decisions": len(decisions)}
