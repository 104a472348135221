"""Whether rollout and training compute the same densities and values, asked before a run's first update.

Where they do not, every probability ratio is wrong from the start. Under bfloat16 they cannot to a thousandth: the old
ones are then computed again, as training does.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.policies import FlowPolicy
from services.trainer.policy_gradient_config import PolicyGradientConfig
from services.trainer.rollout_arrays import Rollout
from services.trainer.surrogate import log_ratios


class AgreementError(RuntimeError):
    """Rollout and training do not compute the same density or value: every ratio would be wrong.

    What to do: Use one device class and one number of threads for rollout and training, and report the figures.
    """


def check_agreement(policy: FlowPolicy, rollout: Rollout, config: PolicyGradientConfig) -> dict[str, float]:
    """Compare the rollout's log-probabilities and values with those that training computes, in other batches.

    Values are measured alone where the policy is set to differ (`value_rollout`: "mean_over_steps").

    Returns:
        agreement/max_ratio_error, max |ratio - 1|, and agreement/max_value_error.

    Raises:
        AgreementError: where one exceeds `agreement_tolerance`, or is no number.
    """
    # Backwards: rows meet other companions than in the rollout, or when they were computed again.
    rows = rollout.acted_rows()[::-1].copy()
    worst_ratio, worst_value = _errors(rollout, rows, *_training_view(policy, rollout, rows, config), config)
    checked = [worst_ratio] + ([worst_value] if policy.config.value_rollout == "same" else [])
    if not all(error <= config.agreement_tolerance for error in checked):
        raise AgreementError(
            f"before the first update: expected rollout and training to agree to {config.agreement_tolerance:g}; got "
            f"max |ratio - 1| = {worst_ratio:.3g} and max |value difference| = {worst_value:.3g}. The policy's "
            "act() and evaluate_sample() compute different functions (noise settings, dropout, precision), or the "
            "observations changed on the way. Under bfloat16, use --recompute-log-probabilities True."
        )
    return {"agreement/max_ratio_error": worst_ratio, "agreement/max_value_error": worst_value}


def recompute_old(policy: FlowPolicy, rollout: Rollout, config: PolicyGradientConfig) -> dict[str, float]:
    """Replace the rollout's log-probabilities and values, in place, by those that training computes.

    Values stay as they are where the policy is set to differ between rollout and training.

    Returns:
        How far they were apart: agreement/rollout_max_ratio_error and agreement/rollout_max_value_error.
    """
    rows = rollout.acted_rows()
    log_probabilities, values = _training_view(policy, rollout, rows, config)
    ratio, value = _errors(rollout, rows, log_probabilities, values, config)
    replaced = {"log_probabilities": log_probabilities}
    if policy.config.value_rollout == "same":
        replaced["values"] = values
    for name, new in replaced.items():
        kept = rollout.samples[name]
        kept.view(-1, *kept.shape[2:])[torch.from_numpy(rows)] = new
    return {"agreement/rollout_max_ratio_error": ratio, "agreement/rollout_max_value_error": value}


def _training_view(
    policy: FlowPolicy, rollout: Rollout, rows: NDArray[np.int64], config: PolicyGradientConfig
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and values of flat decisions `rows` by `evaluate_sample`, in microbatches."""
    log_probabilities, values = [], []
    with torch.no_grad():
        for first in range(0, len(rows), config.microbatch_size):
            part = rows[first : first + config.microbatch_size]
            evaluation = policy.evaluate_sample(rollout.observation(part), rollout.sample(part))
            log_probabilities.append(evaluation.log_probabilities)
            values.append(evaluation.values)
    return torch.cat(log_probabilities), torch.cat(values)


def _errors(
    rollout: Rollout,
    rows: NDArray[np.int64],
    log_probabilities: Tensor,
    values: Tensor,
    config: PolicyGradientConfig,
) -> tuple[float, float]:
    old = rollout.sample(rows)
    ratio = log_ratios(log_probabilities, old.log_probabilities, config.ratio_level).exp()
    # A tensor's maximum is NaN if one number is; Python's max() would pass over it.
    return float((ratio - 1.0).abs().max()), float((values - old.values).abs().max())
