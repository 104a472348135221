"""Rollout and training densities and values, compared before the first update, for every choice of PPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import ppo
from services.trainer.agreement import AgreementError, check_agreement, recompute_old
from services.trainer.ppo_config import PPOConfig
from services.trainer.recipes import load_recipe
from services.trainer.rollout import collect_rollout
from services.trainer.run_record import RunRecord, read_jsonl
from services.trainer.surrogate import log_ratios

IDS = [f"task/train/{number}" for number in range(8)]


def config_of(out: Path = Path("unused"), **changes: Any) -> PPOConfig:
    values: dict[str, Any] = {
        "out": out, "iterations": 2, "episodes_per_iteration": 16, "batch": 8, "policy_batch": 8, "minibatch_size": 16,
        "microbatch_size": 8, "critic_warmup_iterations": 0, "reward_source": "success", "update_epochs": 2,
        "learning_rate": 1e-3, "noise_level": 0.5, "noise_steps": (0, 1),
    }  # fmt: skip
    return PPOConfig(**{**values, **changes})


def rollout_of(client: Any, policy: Any, config: PPOConfig) -> Any:
    policy.reconfigure(config.seed, **config.policy_settings())
    awaken(policy)
    return collect_rollout(client, policy, IDS, 0, "success", "sample", 8)


def awaken(policy: Any) -> None:
    """Zero-initialised parts get weights, as training gives them."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for value in policy.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=generator))


CHOICES: list[dict[str, Any]] = [
    {},
    {"value_input": "expert"},
    {"value_input": "prefix_tokens"},
    {"ratio_level": "action"},
    {"ratio_level": "element"},
    {"ratio_level": "element", "noise_modes": 2},
    {"noise_correlation": 0.9},
    {"temperature": 1.5},
    {"exploration": "flow_noise"},
    {"exploration": "flow_noise", "noise_modes": 1, "value_input": "expert"},
    {"exploration": "flow_noise", "ratio_level": "element"},
]


@pytest.mark.parametrize(
    "choice", CHOICES, ids=lambda choice: ", ".join(f"{k}={v}" for k, v in choice.items()) or "default"
)
def test_rollout_and_training_agree_to_a_thousandth(bandit: Any, tiny_policy: Any, choice: dict[str, Any]) -> None:
    policy, config = tiny_policy(), config_of(**choice)
    rollout = rollout_of(bandit(), policy, config)
    found = check_agreement(policy, rollout, config)
    assert 0.0 <= found["agreement/max_ratio_error"] <= 1e-3
    assert 0.0 <= found["agreement/max_value_error"] <= 1e-3


def test_the_known_mismatch_is_measured_and_lets_the_run_go_on(bandit: Any, tiny_policy: Any) -> None:
    policy = tiny_policy()
    config = config_of(value_input="expert", value_rollout="mean_over_steps")
    rollout = rollout_of(bandit(), policy, config)
    found = check_agreement(policy, rollout, config)
    assert found["agreement/max_ratio_error"] <= 1e-3
    assert found["agreement/max_value_error"] > 1e-3
    before = rollout.values.clone()
    recompute_old(policy, rollout, config)
    assert torch.equal(rollout.values, before)  # or the mismatch would be gone


def test_bfloat16_needs_the_old_densities_computed_again(bandit: Any, tiny_policy: Any) -> None:
    policy, config = tiny_policy(), config_of(precision="bfloat16", noise_level=0.05)
    assert config.recomputes
    assert not config_of().recomputes
    assert not config_of(precision="bfloat16", recompute_log_probabilities=False).recomputes
    rollout = rollout_of(bandit(), policy, config)
    rollout.samples["log_probabilities"] += 0.01  # what other kernels than this machine's would round
    with pytest.raises(AgreementError, match="--recompute-log-probabilities True"):
        check_agreement(policy, rollout, config)
    moved = recompute_old(policy, rollout, config)
    assert moved["agreement/rollout_max_ratio_error"] > 1e-3
    assert check_agreement(policy, rollout, config)["agreement/max_ratio_error"] <= 1e-3


def test_recomputed_densities_are_those_that_training_computes(bandit: Any, tiny_policy: Any) -> None:
    policy, config = tiny_policy(), config_of()
    rollout = rollout_of(bandit(), policy, config)
    kept = rollout.samples["log_probabilities"].clone()
    rollout.samples["log_probabilities"] += 1.0
    recompute_old(policy, rollout, config)
    assert torch.allclose(rollout.samples["log_probabilities"], kept, atol=1e-4)


def test_levels_of_the_ratio_by_hand() -> None:
    new = torch.tensor([[[0.1, 0.2], [-0.3, 0.4]]])  # one sample, two actions of two numbers
    old = torch.zeros(1, 2, 2)
    assert log_ratios(new, old, "element").tolist()[0] == pytest.approx([0.1, 0.2, -0.3, 0.4])
    assert log_ratios(new, old, "chunk").tolist()[0] == pytest.approx([0.4])
    assert log_ratios(new.sum(-1), old.sum(-1), "action").tolist()[0] == pytest.approx([0.3, 0.1])


# Whole runs of each choice -----------------------------------------------------------------------------------------


def train(client: Any, policy: Any, config: PPOConfig) -> list[dict[str, Any]]:
    record = RunRecord(config.out, {}, config.resume)
    try:
        ppo.train(client, policy, IDS, config, record)
    finally:
        record.close()
    return read_jsonl(config.out / "metrics.jsonl")


@pytest.mark.parametrize(
    "choice",
    [
        {"value_input": "expert", "value_rollout": "mean_over_steps", "limit_as": "truncated"},
        {"value_input": "expert", "value_detached": False, "critic_warmup_iterations": 1},
        {"exploration": "flow_noise", "ratio_level": "action", "value_input": "expert", "limit_as": "truncated"},
        {"ratio_level": "element", "temperature": 1.5},
        {"precision": "bfloat16", "limit_as": "truncated"},
    ],
    ids=lambda choice: next(iter(choice)),
)
def test_a_run_with_each_choice_trains_and_resumes_alike(
    bandit: Any, tiny_policy: Any, tmp_path: Path, choice: dict[str, Any]
) -> None:
    whole = train(bandit(), tiny_policy(), config_of(tmp_path / "whole", **choice))
    assert all(np.isfinite(row["critic/value_loss"]) for row in whole)
    assert whole[-1]["actor/optimizer_steps"] > 0
    cut = config_of(tmp_path / "cut", **choice)
    with pytest.raises(ConnectionError):
        train(bandit(fail_after_resets=16 + 8), tiny_policy(), cut)
    again = train(bandit(), tiny_policy(), config_of(tmp_path / "cut", resume=True, **choice))
    for name in ("env/success", "critic/value_loss", "actor/approx_kl"):
        assert again[-1].get(name) == whole[-1].get(name), name


def test_the_recipes_of_the_study_run(bandit: Any, tiny_policy: Any, tmp_path: Path) -> None:
    small = {"episodes_per_iteration": 8, "batch": 8, "policy_batch": 8, "noise_steps": (0, 1), "iterations": 2}
    errors = {}
    for name in ("original", "corrected"):
        warmup = {"critic_warmup_iterations": 1} if name == "corrected" else {}
        config = PPOConfig(**{**load_recipe(name, PPOConfig), **small, **warmup, "out": tmp_path / name})
        policy = tiny_policy()
        awaken(policy)
        [first, _] = train(bandit(), policy, config)
        errors[name] = first["agreement/max_value_error"]
        assert policy.config.value_input == ("expert" if name == "original" else "prefix")
    assert errors["corrected"] <= 1e-3


def test_an_undetached_expert_critic_moves_the_expert_and_a_detached_one_in_warm_up_does_not(
    bandit: Any, tiny_policy: Any
) -> None:
    for detached in (True, False):
        policy, config = tiny_policy(), config_of(value_input="expert", value_detached=detached, ratio_level="chunk")
        rollout = rollout_of(bandit(), policy, config)
        learner = ppo.Learner(policy, config)
        targets = ppo.make_targets(rollout, torch.zeros(len(rollout)), config)
        targets.advantages.zero_()  # the policy loss has no gradient: what moves the expert is the value loss
        before = {name: value.clone() for name, value in policy.state_dict().items()}
        learner.update(rollout, targets, 0, np.random.default_rng(0))
        moved = {n.split(".")[0] for n, value in policy.state_dict().items() if not torch.equal(value, before[n])}
        assert moved == ({"value_head"} if detached else {"value_head", "expert"})
