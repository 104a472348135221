"""Direct preference optimisation of a flow policy on recorded episodes, in one file; `worldserve dpo` runs it.

Of two episodes from one initial state the successful one is preferred. A flow has no density that is cheap to compare,
so DPO (Rafailov et al. 2023, arXiv 2305.18290) is taken in the form of Diffusion-DPO (Wallace et al. 2023, arXiv
2311.12908, equation 14) for flow matching (Flow-DPO: Liu et al. 2025, arXiv 2501.13918, with its constant beta):

    loss = -log sigmoid(-beta / 2 * ((e(w) - e_ref(w)) - (e(l) - e_ref(l))))

with e the squared error of the velocity at one flow time and noise, the same for chosen w, rejected l, policy and
reference. The reference is the policy that training starts from.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.dpo_config import DPOConfig
from services.trainer.policies import FlowPolicy, load_weights, save_policy
from services.trainer.ppo_metrics import numbers
from services.trainer.preferences import RecordedDecisions, make_pairs
from services.trainer.run_record import RunRecord


@dataclass(frozen=True)
class Errors:
    """Squared velocity errors of B pairs at K decisions, mean over a chunk's numbers: each (B, K)."""

    chosen: Tensor
    rejected: Tensor


def preference_logits(policy: Errors, reference: Errors, beta: float, unit: str) -> Tensor:
    """Argument of the sigmoid, positive where the policy prefers the chosen one more than the reference does.

    (B, K) with unit "decision", (B, 1) with "episode", which adds an episode's decisions.
    """
    margin = (policy.chosen - reference.chosen) - (policy.rejected - reference.rejected)
    margin = margin.sum(1, keepdim=True) if unit == "episode" else margin
    return -0.5 * beta * margin


def dpo_loss(logits: Tensor) -> Tensor:
    """-log sigmoid, a mean."""
    return -torch.nn.functional.logsigmoid(logits).mean()


def preference_metrics(policy: Errors, reference: Errors, logits: Tensor, beta: float) -> dict[str, float]:
    """Names as in TRL's DPO trainer: implicit rewards are beta / 2 times how much smaller the error became."""
    chosen = -0.5 * beta * (policy.chosen.detach() - reference.chosen)
    rejected = -0.5 * beta * (policy.rejected.detach() - reference.rejected)
    return {
        "dpo/loss": float(dpo_loss(logits.detach())),
        "rewards/chosen": float(chosen.mean()),
        "rewards/rejected": float(rejected.mean()),
        "rewards/margins": float((chosen - rejected).mean()),
        "rewards/accuracies": float((logits > 0).float().mean() + 0.5 * (logits == 0).float().mean()),
        "dpo/chosen_error": float(policy.chosen.detach().mean()),
    }


def split_states(
    data: RecordedDecisions, pairs: NDArray[np.int64], share: float, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs to train on and pairs to validate on; no state has both."""
    states = np.array([data.initial_state_ids[chosen] for chosen, _ in pairs])
    unique = np.unique(states)
    held = random.permutation(unique)[: round(share * len(unique))]
    validation = np.isin(states, held)
    return pairs[~validation], pairs[validation]


class Learner:
    """The policy, its reference and its optimiser."""

    def __init__(self, policy: FlowPolicy, data: RecordedDecisions, config: DPOConfig) -> None:
        self.policy, self.data, self.config = policy, data, config
        self.decisions = config.decisions or tuple(range(data.decisions))
        if max(self.decisions) >= data.decisions:
            raise ValueError(f"decisions: expected some of 0 to {data.decisions - 1}; got {config.decisions}")
        self.reference = copy.deepcopy(policy).requires_grad_(False)
        idle = policy.value_parameters() + (policy.prefix_parameters() if config.trainable == "expert" else [])
        for parameter in idle:
            parameter.requires_grad_(False)
        self.parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, config.learning_rate)

    def compare(self, pairs: NDArray[np.int64], generator: torch.Generator) -> tuple[Errors, Errors, Tensor]:
        """Errors of policy (with gradient) and reference at the same noise and times, and the logits."""
        device, config = self.policy.state_mean.device, self.policy.config
        draws, rows = self.config.draws, len(pairs) * len(self.decisions)
        shape = (draws * rows, config.chunk_actions, config.action_dimensions)
        noise = self.policy.flow_noise(shape, generator).unflatten(0, (draws, rows)).to(device)
        times = 1.0 - torch.rand(draws, rows, generator=generator).to(device)  # in (0, 1]
        policy, reference = [], []
        for side in (0, 1):
            observation, actions = self.data.batch(pairs[:, side], self.decisions)
            with torch.no_grad():
                prefix = self.reference.encode(observation)
                errors = self.reference.flow_matching_errors(observation, actions, noise, times, prefix)
                reference.append(self._by_pair(errors))
            shared = prefix if self.config.trainable == "expert" else None
            errors = self.policy.flow_matching_errors(observation, actions, noise, times, shared)
            policy.append(self._by_pair(errors))
        found = Errors(*policy), Errors(*reference)
        return *found, preference_logits(*found, self.config.beta, self.config.unit)

    def _by_pair(self, errors: Tensor) -> Tensor:
        """(draws, B * K, actions, dimensions) to means (B, K)."""
        return errors.mean((0, 2, 3)).reshape(-1, len(self.decisions))

    def step(self, pairs: NDArray[np.int64], generator: torch.Generator) -> dict[str, float]:
        """One optimiser step; its metrics."""
        self.optimizer.zero_grad(set_to_none=True)
        seen: list[tuple[float, dict[str, float]]] = []
        for part in _slices(pairs, self.config.microbatch_size):
            policy, reference, logits = self.compare(part, generator)
            loss = dpo_loss(logits) + self.config.sft_weight * policy.chosen.mean()
            if not bool(torch.isfinite(loss)):
                raise FloatingPointError(
                    f"dpo: expected a finite loss; got {float(loss.detach())}. Lower --learning-rate or --beta."
                )
            share = len(part) / len(pairs)
            (loss * share).backward()
            seen.append((share, preference_metrics(policy, reference, logits, self.config.beta)))
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        if not np.isfinite(norm):
            raise FloatingPointError(f"dpo: expected a finite gradient norm; got {norm}. Lower --learning-rate.")
        self.optimizer.step()
        return _mean(seen) | {"actor/grad_norm": norm}

    @torch.no_grad()
    def validate(self, pairs: NDArray[np.int64]) -> dict[str, float]:
        """The metrics of pairs that are not trained on, always at the same noise and times."""
        generator = torch.Generator().manual_seed(_seed(self.config.seed, 3))
        seen = []
        for part in _slices(pairs, self.config.microbatch_size):
            policy, reference, logits = self.compare(part, generator)
            seen.append((len(part) / len(pairs), preference_metrics(policy, reference, logits, self.config.beta)))
        return {f"validation/{name}": value for name, value in _mean(seen).items()}


def train(
    policy: FlowPolicy,
    data: RecordedDecisions,
    config: DPOConfig,
    record: RunRecord,
    on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
    card: dict[str, Any] | None = None,
) -> FlowPolicy:
    """Run `config.epochs` of DPO; `policy`, which is the reference as it comes, is trained in place and returned."""
    pairs = make_pairs(data, config.pairs_per_state, np.random.default_rng([config.seed, 1]))
    training, validation = split_states(data, pairs, config.validation_share, np.random.default_rng([config.seed, 2]))
    if not len(training):
        raise ValueError(
            f"data: expected an initial state with a success and a failure to train on; got {len(pairs)} pairs of "
            f"{len(set(data.initial_state_ids))} states, {len(validation)} of them held out. Record more episodes a "
            "state, or lower --validation-share."
        )
    learner = Learner(policy, data, config)
    first = record.resume(partial(load_weights, policy), {"policy": learner.optimizer}) if config.resume else 0
    for epoch in range(first, config.epochs):
        cpu, seen = time.process_time(), []
        order = training[np.random.default_rng([config.seed, 3, epoch]).permutation(len(training))]
        on_progress("update", 0, -(-len(order) // config.batch_size))
        for number, batch in enumerate(_slices(order, config.batch_size)):
            generator = torch.Generator().manual_seed(_seed(config.seed, 4, epoch, number))
            seen.append((len(batch) / len(order), learner.step(batch, generator)))
            on_progress("update", 1, 0)
        metrics = _mean(seen) | (learner.validate(validation) if len(validation) else {})
        metrics |= {"dpo/pairs": len(training), "dpo/validation_pairs": len(validation)}
        metrics |= {"actor/optimizer_steps": len(seen), "time/update_cpu_s": time.process_time() - cpu}
        record.log(epoch, metrics)
        about = {**(card or {}), "epoch": epoch + 1, "seed": config.seed, "metrics": numbers(metrics)}
        record.checkpoint(epoch + 1, partial(save_policy, policy, card=about), {"policy": learner.optimizer}, {})
        names = ["dpo/loss", "rewards/accuracies", "validation/rewards/accuracies", "validation/dpo/loss"]
        shown = ", ".join(f"{name} {metrics[name]:.3f}" for name in names if name in metrics)
        on_progress(f"epoch {epoch}: {shown}, {metrics['time/update_cpu_s']:.0f} CPU-s", 1, config.epochs)
    return policy


def _mean(seen: Sequence[tuple[float, dict[str, float]]]) -> dict[str, Any]:
    return {name: sum(share * values[name] for share, values in seen) for name in seen[0][1]}


def _slices(pairs: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    for first in range(0, len(pairs), size):
        yield pairs[first : first + size]


def _seed(*numbers_: int) -> int:
    return int(np.random.SeedSequence(numbers_).generate_state(1, np.uint64)[0] >> np.uint64(1))
