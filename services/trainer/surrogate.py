"""The clipped surrogate of PPO and GRPO, and group advantages: plain functions of tensors.

torchrl's ClipPPOLoss wants a TensorDict actor that draws from a distribution object; the flow policy hands over
densities, so the loss is written here and tested against torchrl's. So is its group advantage (MCAdvantage), which is a
transform of a replay buffer keyed by prompts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_ratios(new: Tensor, old: Tensor, level: str) -> Tensor:
    """log pi_new / pi_old of log-probabilities (B, actions[, dimensions]).

    (B, 1) at level "chunk", (B, actions) at "action", (B, actions * dimensions) at "element".
    """
    difference = (new - old).flatten(1)
    return difference.sum(1, keepdim=True) if level == "chunk" else difference


def policy_loss(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, weight: Tensor | None = None
) -> Tensor:
    """PPO's clipped surrogate (equation 7 of Schulman et al. 2017), negated; a mean over decisions and units.

    Args:
        log_ratio: (B, units). advantages: (B,).
        weight: (B,), of each decision in the mean (none: 1 each); decisions of weight 0 carry no loss.
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None]).mean(1)
    return loss.mean() if weight is None else (loss * weight).sum() / weight.sum()


def group_advantages(returns: Tensor, group: int) -> Tensor:
    """Return of each episode minus the mean of the others of its group, `group` in a row: (N,)."""
    table = returns.reshape(-1, group)
    others = (table.sum(1, keepdim=True) - table) / (group - 1)
    return (table - others).reshape(-1)


def standardised_group_advantages(returns: Tensor, group: int) -> Tensor:
    """GRPO's (Shao et al. 2024, arXiv 2402.03300): minus the group's mean, over its deviation; `group` in a row: (N,).

    A group of one outcome has no deviation, and advantages of 0.
    """
    table = returns.reshape(-1, group)
    centred = table - table.mean(1, keepdim=True)
    return (centred / table.std(1, keepdim=True).clamp(min=1e-6)).reshape(-1)
