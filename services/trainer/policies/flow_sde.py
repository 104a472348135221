"""Flow-SDE: the stochastic denoise step of a flow policy, and its density; the densities of flow-noise, too.

Notation of the pi_RL report (arXiv 2510.25889): t = 1 is noise and t = 0 the action; x_t = t noise + (1 - t) action;
velocity v = noise - action, so the action is x_t - t v and the noise x_t + (1 - t) v. A step goes from t to t - d.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def step_moments(x: Tensor, velocity: Tensor, time: Tensor, step: float, noise_level: float) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of x at t - d, given x at t.

    sigma = a sqrt(t / (1 - t)), with 1 - t taken as d at t = 1;
    mean = (1 - (t - d)) action + (t - d - sigma^2 d / (2 t)) noise; std = sqrt(d) sigma.

    Args:
        x: (B, actions, dimensions) at t. velocity: the same shape. time: t of each sample, (B,), in (0, 1].
        step: d. noise_level: a; 0 gives the deterministic (Euler) step.

    Returns:
        mean (B, actions, dimensions) and std (B,).
    """
    remaining = torch.where(time >= 1.0 - 1e-6, torch.full_like(time, step), 1.0 - time)
    sigma = noise_level * torch.sqrt(time / remaining)
    after = time - step
    action = x - time[:, None, None] * velocity
    noise = x + (1.0 - time)[:, None, None] * velocity
    weight = after - sigma**2 * step / (2.0 * time)
    mean = (1.0 - after)[:, None, None] * action + weight[:, None, None] * noise
    return mean, math.sqrt(step) * sigma


def correlate(white: Tensor, correlation: float) -> Tensor:
    """White noise (B, actions, dimensions) to unit variance, stationary AR(1) over the actions."""
    if correlation == 0.0:
        return white
    count = white.shape[1]
    lag = torch.arange(count)[:, None] - torch.arange(count)[None, :]
    weights = torch.where(lag >= 0, correlation ** lag.clamp(min=0).to(white.dtype), torch.zeros(()))
    weights[:, 1:] *= math.sqrt(1.0 - correlation**2)
    return torch.einsum("kj,bjd->bkd", weights.to(white), white)


def _per_number(std: Tensor) -> Tensor:
    """A deviation a sample, (B,), as one that broadcasts over its numbers; others already do."""
    return std[:, None, None] if std.ndim == 1 else std


def log_probabilities(x: Tensor, mean: Tensor, std: Tensor, correlation: float, per_element: bool = False) -> Tensor:
    """Log-density of x (B, actions, dimensions), summed over the dimensions of an action: (B, actions).

    With correlated noise, action k's term is its density given the earlier actions of the chunk; in both cases the sum
    over actions is the density of the chunk. std is (B,), or broadcasts to x. With `per_element` nothing is summed.
    """
    # Double precision inside: a chunk's density is a sum of 700 terms whose differences become a ratio.
    scale = _per_number(std).double().expand(x.shape)
    normalised = (x - mean).double() / scale
    log_scale = torch.log(scale)
    if correlation > 0.0:
        innovation = math.sqrt(1.0 - correlation**2)
        later = (normalised[:, 1:] - correlation * normalised[:, :-1]) / innovation
        normalised = torch.cat([normalised[:, :1], later], dim=1)
        extra = torch.full((x.shape[1],), math.log(innovation), dtype=torch.float64, device=x.device)
        extra[0] = 0.0
        log_scale = log_scale + extra[:, None]
    density = -0.5 * normalised**2 - log_scale - 0.5 * math.log(2.0 * math.pi)
    return (density if per_element else density.sum(-1)).to(x.dtype)


@lru_cache
def smooth_modes(count: int, actions: int) -> Tensor:
    """The first `count` cosine modes over a chunk, (count, actions): orthogonal, mean square 1 each (DCT-II).

    Mode 0 moves the whole chunk aside, mode 1 tilts it, and so on.
    """
    place = (torch.arange(actions, dtype=torch.float64) + 0.5) / actions
    modes = torch.cos(math.pi * torch.arange(count, dtype=torch.float64)[:, None] * place)
    return torch.where(torch.arange(count)[:, None] == 0, modes, math.sqrt(2.0) * modes)


def smooth_noise(white: Tensor, count: int, moved: Tensor) -> Tensor:
    """White noise (B, actions, dimensions) to noise in the first `count` smooth modes alone; unit mean variance.

    Dimensions where `moved` (dimensions,) is 0 get none.
    """
    modes = smooth_modes(count, white.shape[1]).to(white)
    return torch.einsum("mk,bmd->bkd", modes, white[:, :count]) / math.sqrt(count) * moved


def mode_log_probabilities(
    x: Tensor, mean: Tensor, std: Tensor, count: int, moved: Tensor, per_element: bool = False
) -> Tensor:
    """Log-density of x's smooth modes (see smooth_noise), summed over the moved dimensions: (B, count).

    This is the density of the part of the chunk that is explored, its coordinates in the modes; what the modes cannot
    express has no noise, so no density, and takes no part in the ratio. A chunk's ratio then has `count` terms a
    dimension instead of one an action, each as wide as the noise: the variance of PPO's gradient falls with them.
    std is (B,), or broadcasts to (B, 1, dimensions). With `per_element` nothing is summed: (B, count, moved ones).
    """
    modes = smooth_modes(count, x.shape[1]).to(x.device)
    scale = (_per_number(std).double() / math.sqrt(count)).expand(x.shape[0], 1, x.shape[2])
    coordinates = torch.einsum("mk,bkd->bmd", modes, (x - mean).double() / scale) / x.shape[1]
    density = -0.5 * coordinates**2 - torch.log(scale) - 0.5 * math.log(2.0 * math.pi)
    density = density[..., moved.bool()]
    return (density if per_element else density.sum(-1)).to(x.dtype)
