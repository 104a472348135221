"""The flow policy: its densities, its independence of batches, its action convention, its files."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from services.trainer.policies import (
    FlowPolicy,
    FlowPolicyConfig,
    PolicyObservation,
    PolicySample,
    flow_mini,
    load_policy,
    save_policy,
)
from services.trainer.policies.flow_sde import (
    correlate,
    log_probabilities,
    mode_log_probabilities,
    smooth_modes,
    smooth_noise,
    step_moments,
)
from services.trainer.policies.tokens import tokenize

BATCH = 6


def small(**changes: object) -> FlowPolicyConfig:
    """A quarter of flow-mini's width: the same code, quickly."""
    narrow = {
        "vision_width": 32,
        "vision_mlp_width": 48,
        "prefix_width": 32,
        "prefix_mlp_width": 48,
        "expert_width": 32,
        "expert_mlp_width": 48,
        "layers": 2,
        "heads": 2,
        "key_value_heads": 1,
        "head_width": 16,
        "value_width": 16,
    }
    return FlowPolicyConfig(**{**narrow, **changes})


def policy_of(config: FlowPolicyConfig, seed: int = 0) -> FlowPolicy:
    """A policy whose zero-initialised parts are not zero, as after training."""
    policy = FlowPolicy(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for value in policy.parameters():
            value.add_(0.02 * torch.randn(value.shape, generator=generator))
    dimensions = config.action_dimensions
    policy.set_statistics(
        torch.linspace(-0.2, 0.2, dimensions),
        torch.linspace(0.1, 0.5, dimensions),
        torch.linspace(-0.1, 0.3, dimensions),
        torch.linspace(0.05, 0.4, dimensions),
    )
    return policy


def observation_of(batch: int = BATCH, seed: int = 0) -> PolicyObservation:
    generator = torch.Generator().manual_seed(seed)
    words = [
        "pick up the green bottle",
        "hold it upright with the left arm please and thank you very very much indeed",
        "go",
    ]
    return PolicyObservation(
        torch.randint(0, 256, (batch, 96, 128, 3), dtype=torch.uint8, generator=generator),
        torch.randn(batch, 14, generator=generator) * 0.3,
        [words[index % 3] for index in range(batch)],
    )


def generators(batch: int = BATCH, first: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(first + index) for index in range(batch)]


def largest_ratio_error(new: torch.Tensor, old: torch.Tensor) -> float:
    """max |ratio - 1| of chunk-level probability ratios."""
    return float((torch.exp((new.detach() - old).sum(1)) - 1.0).abs().max())


@pytest.mark.parametrize("prediction", ["velocity", "action"])
@pytest.mark.parametrize("correlation", [0.0, 0.95])
@pytest.mark.parametrize("noise_steps", [(0, 1, 2, 3, 4), (0,), (4,)])
def test_rollout_and_training_densities_and_values_agree(prediction, correlation, noise_steps):
    policy = policy_of(small(prediction=prediction, noise_correlation=correlation, noise_steps=noise_steps))
    observation = observation_of()
    sample = policy.act(observation, generators(), "sample")
    assert set(sample.denoise_index.tolist()) <= set(noise_steps)
    evaluation = policy.evaluate_sample(observation, sample)
    assert largest_ratio_error(evaluation.log_probabilities, sample.log_probabilities) <= 1e-3
    assert torch.allclose(evaluation.values, sample.values, atol=1e-5)
    assert evaluation.log_probabilities.requires_grad
    assert evaluation.values.requires_grad


@pytest.mark.parametrize("modes", [1, 3])
def test_rollout_and_training_densities_of_smooth_modes_agree(modes):
    policy = policy_of(small(noise_modes=modes))
    observation = observation_of()
    sample = policy.act(observation, generators(), "sample")
    assert sample.log_probabilities.shape == (BATCH, modes)
    evaluation = policy.evaluate_sample(observation, sample)
    assert largest_ratio_error(evaluation.log_probabilities, sample.log_probabilities) <= 1e-3


def test_densities_agree_in_other_batches_at_full_size():
    policy = policy_of(flow_mini())
    observation = observation_of()
    sample = policy.act(observation, generators(), "sample")
    assert sample.log_probabilities.shape == (BATCH, 2)  # explores in two smooth modes, as recipes/mini.yaml does
    rows = torch.tensor([5, 1, 2])
    evaluation = policy.evaluate_sample(observation.select(rows), sample.select(rows))
    assert largest_ratio_error(evaluation.log_probabilities, sample.log_probabilities[rows]) <= 1e-3


def test_a_sample_depends_on_its_own_generator_alone():
    policy = policy_of(small())
    observation = observation_of()
    together = policy.act(observation, generators(), "sample")
    for row in (0, 4):
        alone = policy.act(observation.select(torch.tensor([row])), generators(1, first=row), "sample")
        assert int(alone.denoise_index[0]) == int(together.denoise_index[row])
        assert torch.allclose(alone.actions[0], together.actions[row], atol=1e-5)
    again = policy.act(observation, generators(), "sample")
    assert torch.equal(again.actions, together.actions)
    assert torch.equal(again.chain, together.chain)


def test_no_global_random_state_is_read_or_written():
    before = torch.random.get_rng_state()
    first = policy_of(small())
    first.act(observation_of(), generators(), "sample")
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(7)  # moves the global state
    second = policy_of(small())
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_mean_mode_shares_the_initial_noise_and_has_no_density():
    policy = policy_of(small())
    observation = observation_of()
    mean = policy.act(observation, generators(), "mean")
    assert mean.denoise_index.tolist() == [-1] * BATCH
    assert not mean.log_probabilities.any()
    policy.config = policy.config.replace(noise_level=1e-6)
    assert torch.allclose(policy.act(observation, generators(), "sample").actions, mean.actions, atol=1e-4)
    with pytest.raises(ValueError, match="denoise_index"):
        policy.evaluate_sample(observation, mean)


def test_actions_are_deltas_to_the_given_state_and_grippers_absolute():
    policy = FlowPolicy(small())
    state = torch.zeros(1, 14)
    state[0, 0], state[0, 6], state[0, 13] = 0.5, 0.25, 1.0
    targets = torch.zeros(1, 50, 14)
    targets[..., 0], targets[..., 6], targets[..., 13] = 0.7, 0.9, 0.1
    relative = policy.relative(targets, state)
    assert relative[0, 0, 0].item() == pytest.approx(0.2)
    assert relative[0, 0, 6].item() == pytest.approx(0.9)
    assert relative[0, 0, 13].item() == pytest.approx(0.1)
    policy = policy_of(small())
    assert torch.allclose(
        policy.denormalise_actions(policy.normalise_actions(targets, state), state), targets, atol=1e-6
    )


def test_standard_deviations_are_those_of_the_reference():
    # REFERENCE: five steps, noise level 0.3.
    times = torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2])
    zeros = torch.zeros(5, 2, 3)
    _, std = step_moments(zeros, zeros, times, 0.2, 0.3)
    assert [round(value, 3) for value in std.tolist()] == [0.3, 0.268, 0.164, 0.11, 0.067]


def test_without_noise_the_step_is_eulers():
    x, velocity = torch.randn(5, 4, 3), torch.randn(5, 4, 3)
    mean, std = step_moments(x, velocity, torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2]), 0.2, 0.0)
    assert torch.allclose(mean, x - 0.2 * velocity, atol=1e-6)
    assert not std.any()


@pytest.mark.parametrize("correlation", [0.0, 0.7, 0.97])
def test_density_is_that_of_the_multivariate_normal(correlation):
    generator = torch.Generator().manual_seed(0)
    count, dimensions, std = 7, 3, torch.tensor([0.4])
    x, mean = (torch.randn(1, count, dimensions, generator=generator, dtype=torch.float64) for _ in range(2))
    lag = (torch.arange(count)[:, None] - torch.arange(count)[None]).abs()
    covariance = std.double() ** 2 * (correlation ** lag.double() if correlation else torch.eye(count))
    expected = sum(
        torch.distributions.MultivariateNormal(mean[0, :, d], covariance).log_prob(x[0, :, d])
        for d in range(dimensions)
    )
    assert log_probabilities(x, mean, std.double(), correlation).sum().item() == pytest.approx(float(expected))


SMOOTH_MODES = [  # sqrt(2) cos(pi m (k + 1/2) / 4) from the second on
    [1.0, 1.0, 1.0, 1.0],
    [1.306563, 0.541196, -0.541196, -1.306563],
    [1.0, -1.0, -1.0, 1.0],
]


def test_smooth_modes_are_the_table_orthogonal_and_of_mean_square_one():
    modes = smooth_modes(3, 4)
    assert torch.allclose(modes, torch.tensor(SMOOTH_MODES, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(modes @ modes.T / 4, torch.eye(3, dtype=torch.float64), atol=1e-12)


def test_smooth_noise_has_unit_variance_on_average_and_leaves_unmoved_dimensions_alone():
    white = torch.randn(20000, 6, 3, generator=torch.Generator().manual_seed(0))
    noise = smooth_noise(white, 2, torch.tensor([1.0, 1.0, 0.0]))
    assert float(noise[..., :2].var(0).mean()) == pytest.approx(1.0, abs=0.02)
    assert not noise[..., 2].any()


def test_mode_density_is_the_normal_density_of_the_modes_coordinates_alone():
    moved, std, count = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.3]), 2
    mean = torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(0)).double()
    coordinates = torch.tensor([[0.5, -1.0], [0.25, 2.0]], dtype=torch.float64)  # (mode, dimension)
    offset = torch.einsum("mk,md->kd", smooth_modes(count, 6), coordinates)
    x = mean + torch.cat([offset, torch.zeros(6, 1)], dim=1)
    scale = 0.3 / math.sqrt(count)
    expected = torch.distributions.Normal(0.0, scale).log_prob(coordinates.float()).sum(1)
    assert torch.allclose(mode_log_probabilities(x, mean, std, count, moved)[0].float(), expected, atol=1e-5)
    shaken = x + 0.7 * smooth_modes(6, 6)[4][:, None] + torch.tensor([0.0, 0.0, 1.0])  # not in the modes; a gripper
    assert torch.allclose(mode_log_probabilities(shaken, mean, std, count, moved)[0].float(), expected, atol=1e-5)


def test_correlated_noise_has_unit_variance_and_the_asked_correlation():
    noise = correlate(torch.randn(20000, 5, 1, generator=torch.Generator().manual_seed(0)), 0.8)[..., 0]
    covariance = noise.T @ noise / len(noise)
    expected = 0.8 ** (torch.arange(5)[:, None] - torch.arange(5)[None]).abs()
    assert (covariance - expected).abs().max() < 0.05


def test_the_critic_trains_the_prefix_only_when_asked():
    for detached in (True, False):
        policy = policy_of(small(value_detached=detached))
        policy.value(observation_of()).sum().backward()
        trained = [value.grad is not None and bool(value.grad.any()) for value in policy.prefix_parameters()]
        assert any(trained) is not detached
        assert all(value.grad is not None for value in policy.value_parameters())


def test_the_density_trains_prefix_and_expert():
    policy = policy_of(small())
    observation = observation_of()
    sample = policy.act(observation, generators(), "sample")
    policy.evaluate_sample(observation, sample).log_probabilities.sum().backward()
    for part in (policy.prefix_parameters(), policy.expert_parameters()):
        assert sum(bool(value.grad is not None and value.grad.any()) for value in part) > 0.8 * len(part)


def test_padded_actions_carry_no_loss():
    policy = policy_of(small())
    observation = observation_of()
    targets = torch.randn(BATCH, 50, 14, generator=torch.Generator().manual_seed(3))
    padded = torch.zeros(BATCH, 50, dtype=torch.bool)
    padded[:, 30:] = True

    def gradient(pad: torch.Tensor | None) -> torch.Tensor:
        leaf = targets.clone().requires_grad_(True)
        policy.flow_matching_loss(observation, leaf, torch.Generator().manual_seed(0), pad).backward()
        return leaf.grad

    # The network reads the whole noised chunk, so padded targets reach the loss of others; their own error does not.
    assert not torch.allclose(gradient(padded), gradient(None))
    everything = torch.ones(BATCH, 50, dtype=torch.bool)
    assert float(policy.flow_matching_loss(observation, targets, torch.Generator(), everything).detach()) == 0.0


def test_a_saved_policy_acts_the_same(tmp_path):
    policy = policy_of(small(noise_steps=(1, 3), interface_fingerprint="ab" * 32))
    save_policy(policy, tmp_path / "policy", {"command": "test"})
    save_policy(policy, tmp_path / "policy", {"command": "again"})
    loaded = load_policy(tmp_path / "policy")
    assert loaded.config == policy.config
    first, second = (item.act(observation_of(), generators(), "sample") for item in (policy, loaded))
    for field in dataclasses.fields(PolicySample):
        assert torch.equal(getattr(first, field.name), getattr(second, field.name)), field.name
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_policy(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda o: dataclasses.replace(o, images=o.images.float()), "images"),
        (lambda o: dataclasses.replace(o, images=o.images[:, :64]), "images"),
        (lambda o: dataclasses.replace(o, state=o.state.double()), "state"),
        (lambda o: dataclasses.replace(o, state=o.state * math.nan), "state"),
    ],
)
def test_a_wrong_observation_is_refused_by_name(change, named):
    policy = FlowPolicy(small())
    with pytest.raises(ValueError, match=f"observation.{named}"):
        policy.act(change(observation_of()), generators(), "mean")


@pytest.mark.parametrize(
    "changes",
    [
        {"image_height": 100},
        {"noise_steps": ()},
        {"noise_steps": (5,)},
        {"actions_per_token": 7},
        {"noise_level": 0.0},
        {"noise_modes": 51},
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        flow_mini(**changes)


def test_diverged_weights_are_not_acted_on():
    policy = FlowPolicy(small())
    with torch.no_grad():
        policy.expert.action_out_proj.bias.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="diverged"):
        policy.act(observation_of(), generators(), "mean")


def test_instructions_are_hashed_alike_everywhere():
    tokens = tokenize(["Pick up the bottle.", "pick UP the bottle", ""], 6, 256)
    assert torch.equal(tokens[0], tokens[1])
    assert tokens[0, 4:].tolist() == [0, 0]
    assert tokens[2].tolist() == [0] * 6
    assert len(set(tokens[0, :4].tolist())) == 4
