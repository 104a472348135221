"""Choices of exploration and critic: flow-noise, levels of the density, temperature, bfloat16, the expert-side critic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from services.trainer.policies import FlowPolicy, load_policy, save_policy
from services.trainer.policies.flow_sde import log_probabilities, mode_log_probabilities
from tests.services.trainer.test_flow_policy import (
    BATCH,
    generators,
    largest_ratio_error,
    observation_of,
    policy_of,
    small,
)

STEPS = 5


def flow_noise(**changes: Any) -> FlowPolicy:
    return policy_of(small(exploration="flow_noise", noise_correlation=0.0, **changes))


# Flow-noise: every step random, a learned deviation, one joint density ---------------------------------------------


@pytest.mark.parametrize("modes", [0, 2])
@pytest.mark.parametrize("level", ["action", "element"])
def test_flow_noise_of_rollout_and_training_agree(modes: int, level: str) -> None:
    policy = flow_noise(noise_modes=modes, log_probability_level=level)
    observation = observation_of()
    sample = policy.act(observation, generators(), "sample")
    assert sample.chain.shape == (BATCH, STEPS + 1, 50, 14)
    assert sample.denoise_index.tolist() == [0] * BATCH
    rows = torch.tensor([4, 0, 3])  # in another batch than at rollout
    evaluation = policy.evaluate_sample(observation.select(rows), sample.select(rows))
    assert evaluation.log_probabilities.shape == sample.log_probabilities[rows].shape
    assert (
        largest_ratio_error(evaluation.log_probabilities.flatten(1), sample.log_probabilities[rows].flatten(1)) <= 1e-3
    )
    assert torch.allclose(evaluation.values, sample.values[rows], atol=1e-5)


def test_the_joint_density_is_the_sum_of_the_steps_normal_densities() -> None:
    """A fresh noise network says the geometric mean of its bounds everywhere: 0.1 between 0.05 and 0.2."""
    policy = FlowPolicy(small(exploration="flow_noise", noise_correlation=0.0, flow_noise_std=(0.05, 0.2)))
    observation = observation_of()
    sample = policy.act(observation, generators(), "sample")
    prefix = policy.encode(observation)
    expected = torch.zeros(BATCH, dtype=torch.float64)
    for number in range(STEPS):
        before, after = sample.chain[:, number], sample.chain[:, number + 1]
        time = torch.full((BATCH,), 1.0 - number / STEPS)
        velocity = (before - policy.expert(before, time, prefix)) / time[:, None, None]
        mean = before - velocity / STEPS  # flow-noise's mean is the deterministic step
        normal = torch.distributions.Normal(mean.double(), 0.1)
        expected += normal.log_prob(after.double()).sum((1, 2)).detach()
    assert torch.allclose(sample.log_probabilities.sum(1).double(), expected, rtol=1e-4)


def test_the_learned_deviation_stays_between_its_bounds_and_is_trained() -> None:
    policy = flow_noise(flow_noise_std=(0.05, 0.2))
    assert policy.noise_head is not None
    observation = observation_of()
    for bias, expected in ((-50.0, 0.05), (50.0, 0.2)):
        with torch.no_grad():
            policy.noise_head[-1].weight.zero_()
            policy.noise_head[-1].bias.fill_(bias)
        sample = policy.act(observation, generators(), "sample")
        velocity, tokens = policy._denoise(sample.chain[:, 0], torch.ones(BATCH), policy.encode(observation))
        _, std = policy._moments(sample.chain[:, 0], velocity, tokens, torch.ones(BATCH))
        assert torch.allclose(std, torch.full_like(std, expected))
    policy = flow_noise()
    sample = policy.act(observation, generators(), "sample")
    policy.evaluate_sample(observation, sample).log_probabilities.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in policy.noise_head.parameters())


def test_flow_noise_is_saved_with_its_network(tmp_path: Any) -> None:
    policy = flow_noise()
    save_policy(policy, tmp_path / "policy", {})
    loaded = load_policy(tmp_path / "policy")
    first, second = (item.act(observation_of(), generators(), "sample") for item in (policy, loaded))
    assert torch.equal(first.actions, second.actions)
    assert torch.equal(first.log_probabilities, second.log_probabilities)


# Levels and temperature --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("modes", "shape"), [(0, (50, 14)), (3, (3, 12))])  # no noise, so no density, on two grippers
def test_elements_add_up_to_the_actions_density(modes: int, shape: tuple[int, int]) -> None:
    policy = policy_of(small(noise_modes=modes))
    observation = observation_of()
    summed = policy.act(observation, generators(), "sample")
    policy.reconfigure(0, log_probability_level="element")
    each = policy.act(observation, generators(), "sample")
    assert each.log_probabilities.shape == (BATCH, *shape)
    assert torch.allclose(each.log_probabilities.sum(-1), summed.log_probabilities, rtol=1e-5, atol=1e-4)
    assert torch.equal(each.actions, summed.actions)


def test_a_deviation_an_element_is_that_of_independent_normals() -> None:
    generator = torch.Generator().manual_seed(0)
    x, mean = (torch.randn(2, 4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    std = torch.rand(2, 4, 3, generator=generator, dtype=torch.float64) + 0.1
    expected = torch.distributions.Normal(mean, std).log_prob(x)
    assert torch.allclose(log_probabilities(x, mean, std, 0.0, per_element=True), expected)
    assert torch.allclose(log_probabilities(x, mean, std, 0.0), expected.sum(-1))
    moved = torch.tensor([1.0, 0.0, 1.0])
    wide = mode_log_probabilities(x, mean, std[:, :1], 2, moved)
    narrow = mode_log_probabilities(x, mean, std[:, :1], 2, moved, per_element=True)
    assert torch.allclose(narrow.sum(-1), wide)


@pytest.mark.parametrize("exploration", ["flow_sde", "flow_noise"])
def test_temperature_widens_the_noise_and_its_density_alike(exploration: str) -> None:
    policy = policy_of(small(exploration=exploration, noise_correlation=0.0, noise_steps=(4,)))
    observation = observation_of()
    mean = policy.act(observation, generators(), "mean")
    cold = policy.act(observation, generators(), "sample")
    policy.reconfigure(0, temperature=2.0)
    hot = policy.act(observation, generators(), "sample")
    if exploration == "flow_sde":  # the last step's noise reaches the actions as it is, around one mean
        assert torch.equal(cold.chain[:, 0], hot.chain[:, 0])
        constant = 50 * 14 * math.log(2.0)  # same standard normals, twice as wide
        assert torch.allclose(
            cold.log_probabilities.sum(1) - hot.log_probabilities.sum(1), torch.tensor(constant), rtol=1e-4
        )
    assert (
        largest_ratio_error(policy.evaluate_sample(observation, hot).log_probabilities, hot.log_probabilities) <= 1e-3
    )
    assert (hot.actions - mean.actions).std() > 1.5 * (cold.actions - mean.actions).std()


# The expert-side critic --------------------------------------------------------------------------------------------


def expert_critic(**changes: Any) -> FlowPolicy:
    return policy_of(small(value_input="expert", **changes))


@pytest.mark.parametrize("exploration", ["flow_sde", "flow_noise"])
def test_the_expert_side_critics_values_agree_unless_asked_otherwise(exploration: str) -> None:
    policy = expert_critic(exploration=exploration)
    observation = observation_of()
    sample = policy.act(observation, generators(), "sample")
    evaluation = policy.evaluate_sample(observation, sample)
    assert torch.allclose(evaluation.values, sample.values, atol=1e-5)
    assert torch.allclose(policy.value(observation, None, sample), sample.values, atol=1e-5)


def test_rlinfs_mismatch_is_a_mean_at_rollout_and_one_step_in_training() -> None:
    policy = expert_critic(value_rollout="mean_over_steps", noise_steps=(0,))
    observation = observation_of()
    sample = policy.act(observation, generators(), "sample")
    training = policy.evaluate_sample(observation, sample).values
    assert (training - sample.values).abs().max() > 1e-3
    # The same draws: training's value is the first step's, the rollout's the mean of all five.
    policy.reconfigure(0, value_rollout="same")
    assert torch.allclose(policy.act(observation, generators(), "sample").values, training, atol=1e-5)
    x, prefix, values = sample.chain[:, 0], policy.encode(observation), []
    for number in range(STEPS):
        velocity, tokens = policy._denoise(x, torch.full((BATCH,), 1.0 - number / STEPS), prefix)
        values.append(policy.value_head(tokens.mean(1))[:, 0])
        x = sample.chain[:, 1] if number == 0 else x - velocity / STEPS
    assert torch.allclose(torch.stack(values).mean(0), sample.values, atol=1e-4)


def test_an_expert_side_value_depends_on_the_drawn_noise_and_a_prefix_side_one_does_not() -> None:
    for value_input, depends in (("expert", True), ("prefix", False)):
        policy = policy_of(small(value_input=value_input))
        first, second = (policy.act(observation_of(), generators(first=n), "sample").values for n in (0, 100))
        assert torch.equal(first, second) is not depends


def test_the_expert_side_critic_trains_the_expert_only_when_asked() -> None:
    for detached in (True, False):
        policy = expert_critic(value_detached=detached)
        observation = observation_of()
        sample = policy.act(observation, generators(), "sample")
        policy.value(observation, None, sample).sum().backward()
        trained = [p.grad is not None and bool(p.grad.any()) for p in policy.expert_parameters()]
        assert any(trained) is not detached
        assert all(p.grad is not None for p in policy.value_parameters())


def test_an_expert_side_value_without_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sample: expected what act\(\) gave"):
        expert_critic().value(observation_of())


def test_another_critic_is_drawn_anew_from_the_seed_and_the_same_one_is_kept() -> None:
    policies = [policy_of(small()) for _ in range(3)]
    before = policies[0].value_head[0].weight.clone()
    policies[0].reconfigure(5, value_input="prefix", temperature=2.0)
    assert torch.equal(policies[0].value_head[0].weight, before)
    policies[1].reconfigure(5, value_input="expert", exploration="flow_noise")
    policies[2].reconfigure(5, value_input="expert", exploration="flow_noise")
    for name, value in policies[1].state_dict().items():
        assert torch.equal(value, policies[2].state_dict()[name]), name
    assert not policies[1].act(observation_of(), generators(), "sample").values.any()  # starts at 0
    policies[1].reconfigure(0, exploration="flow_sde")
    assert policies[1].noise_head is None


# bfloat16 ----------------------------------------------------------------------------------------------------------


def test_bfloat16_computes_otherwise_and_hands_over_float32() -> None:
    policy = policy_of(small())
    observation = observation_of()
    exact = policy.act(observation, generators(), "sample")
    policy.reconfigure(0, precision="bfloat16")
    rounded = policy.act(observation, generators(), "sample")
    for name in ("actions", "chain", "log_probabilities", "values"):
        assert getattr(rounded, name).dtype == torch.float32, name
    assert not torch.equal(rounded.actions, exact.actions)
    assert torch.allclose(rounded.actions, exact.actions, atol=0.1)
    policy.evaluate_sample(observation, rounded).log_probabilities.sum().backward()
    assert all(p.dtype == torch.float32 for p in policy.parameters())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"flow_noise_std": (0.2, 0.1)}, "flow_noise_std"),
        ({"value_rollout": "mean_over_steps"}, "value_rollout"),
        (
            {"value_rollout": "mean_over_steps", "value_input": "expert", "exploration": "flow_noise"},
            "value_rollout",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"FlowPolicyConfig.{named}: expected"):
        small(**changes)
