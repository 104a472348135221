"""A surrogate density of a whole chunk from the flow-matching loss (flow policy optimisation, FPO).

FPO (McAllister et al. 2025, arXiv 2507.21053) replaces PPO's probability ratio by exp(loss_old - loss_new) of the
conditional flow-matching loss on the action that was taken, both at the same drawn noises and flow times. The evidence
lower bound of diffusion models makes this a bound on the log-likelihood's change. Unlike the flow-SDE's density it
credits *all* of the policy's randomness, the initial noise included, and needs no noise added while acting.

Here the loss is the squared error of the predicted clean action at flow times on the sampler's own grid, as the
log-density of a Gaussian with standard deviation `std`, averaged over the draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.trainer.policies import FlowPolicy, PolicyObservation, Prefix
from services.trainer.policies.flow_sde import correlate


@dataclass(frozen=True)
class Draws:
    """Fixed noises (n, M, actions, dimensions) and flow times (n, M) of n decisions."""

    noise: Tensor
    times: Tensor

    def select(self, indices: Tensor) -> Draws:
        """Those of some decisions."""
        return Draws(self.noise[indices], self.times[indices])


def make_draws(policy: FlowPolicy, count: int, draws: int, generator: np.random.Generator) -> Draws:
    """For each decision: one draw at t = 1, where acting starts; the others on the sampler's later times, but the last,
    where the noised action gives itself away.
    """
    config = policy.config
    seeded = torch.Generator().manual_seed(int(generator.integers(2**62)))
    shape = (count * draws, config.chunk_actions, config.action_dimensions)
    noise = correlate(torch.randn(shape, generator=seeded), config.flow_noise_correlation)
    step = torch.randint(1, max(config.denoise_steps - 1, 2), (count, draws), generator=seeded)
    step[:, 0] = 0
    return Draws(noise.reshape(count, draws, *shape[1:]), 1.0 - step / config.denoise_steps)


def flow_matching_log_probabilities(
    policy: FlowPolicy, observation: PolicyObservation, actions: Tensor, draws: Draws, prefix: Prefix | None, std: float
) -> tuple[Tensor, Prefix]:
    """Surrogate log-probabilities (B, actions) of absolute `actions` (B, actions, dimensions), and the prefix."""
    count = draws.times.shape[1]
    prefix = policy.encode(observation) if prefix is None else prefix
    target = policy.normalise_actions(actions, observation.state).repeat_interleave(count, 0)
    time, noise = draws.times.flatten(), draws.noise.flatten(0, 1)
    x = time[:, None, None] * noise + (1.0 - time)[:, None, None] * target
    predicted = x - time[:, None, None] * policy.velocity(x, time, prefix.repeat(count))
    terms = -((predicted - target) ** 2).sum(-1) / (2.0 * std**2)
    return terms.reshape(-1, count, terms.shape[1]).mean(1), prefix
