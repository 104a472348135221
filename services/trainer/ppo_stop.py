"""Why PPO or GRPO leaves out the rest of an iteration's policy steps: the KL divergence, and the alarm of one ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.trainer.policy_gradient_config import PolicyGradientConfig


@dataclass(frozen=True)
class Stop:
    """Why an iteration's remaining policy steps are left out: the setting's name, and what a person should know."""

    name: str
    message: str


def stop_reason(metrics: Mapping[str, float], config: PolicyGradientConfig) -> Stop | None:
    """Of a minibatch's actor/ratio_max and actor/approx_kl, before its step; None where the policy may go on."""
    ratio, kl = metrics["actor/ratio_max"], metrics["actor/approx_kl"]
    if not (np.isfinite(ratio) and ratio <= config.max_ratio):
        return Stop(
            "max_ratio",
            f"a probability ratio of {ratio:.3g} exceeds max_ratio = {config.max_ratio:g}; the policy's remaining "
            "steps of this iteration are skipped, training goes on. If it happens again, lower "
            "learning_rate or raise noise_level.",
        )
    if config.target_kl is not None and kl > 1.5 * config.target_kl:
        return Stop(
            "target_kl",
            f"approx_kl = {kl:.3g} exceeds 1.5 times target_kl = {config.target_kl:g}; the policy's remaining steps of "
            "this iteration are skipped, training goes on. If it happens in every first epoch, lower learning_rate.",
        )
    return None
