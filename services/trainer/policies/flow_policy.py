"""The flow policy: observation to action chunk by flow matching, with an exact density and a critic.

>>> policy = FlowPolicy(flow_mini(), seed=0)
>>> sample = policy.act(observation, [torch.Generator().manual_seed(i) for i in range(len(observation))], "sample")
>>> policy.evaluate_sample(observation, sample).log_probabilities.shape
torch.Size([8, 50])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from services.trainer.policies.config import FlowPolicyConfig
from services.trainer.policies.flow_sde import (
    correlate,
    log_probabilities,
    mode_log_probabilities,
    smooth_noise,
    step_moments,
)
from services.trainer.policies.network import ActionExpert, Prefix, PrefixNetwork, initialise
from services.trainer.policies.observation import (
    PolicyEvaluation,
    PolicyObservation,
    PolicySample,
    check_observation,
)
from services.trainer.policies.tokens import tokenize

# Flow times of training: t = 0.001 + 0.999 Beta(1.5, 1), more often near the noise (pi0, section on flow matching).
_TIME_FLOOR, _TIME_ALPHA = 0.001, 1.5
# With prediction "action" the loss of the velocity is the action's over t^2, capped below this t; acting ends at 0.2.
_WEIGHT_FLOOR = 0.3


class FlowPolicy(nn.Module):
    """pi0.5's architecture at any size. float32; no dropout, so training and evaluation mode agree.

    Actions are joint deltas to the given state and absolute grippers inside, normalised by stored statistics, and
    absolute targets outside.
    """

    state_mean: Tensor
    state_std: Tensor
    action_mean: Tensor
    action_std: Tensor
    delta_mask: Tensor

    def __init__(self, config: FlowPolicyConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # transformers draws while it builds; those draws are replaced below
            self.prefix = PrefixNetwork(config)
            self.expert = ActionExpert(config)
            value_inputs = config.prefix_width * (2 if config.value_input == "prefix_tokens" else 1)
            self.value_head = nn.Sequential(
                nn.Linear(value_inputs, config.value_width),
                nn.SiLU(),
                nn.Linear(config.value_width, config.value_width),
                nn.SiLU(),
                nn.Linear(config.value_width, 1),
            )
        initialise(self, torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.value_head[-1].weight.zero_()  # type: ignore[operator]
        dimensions = config.action_dimensions
        for name in ("state", "action"):
            self.register_buffer(f"{name}_mean", torch.zeros(dimensions))
            self.register_buffer(f"{name}_std", torch.ones(dimensions))
        delta = torch.ones(dimensions)
        delta[list(config.gripper_dimensions)] = 0.0
        self.register_buffer("delta_mask", delta, persistent=False)

    # Parameters by part, for optimisers.
    def prefix_parameters(self) -> list[nn.Parameter]:
        """Vision tower, language model and state projection."""
        return list(self.prefix.parameters())

    def expert_parameters(self) -> list[nn.Parameter]:
        """The action expert."""
        return list(self.expert.parameters())

    def value_parameters(self) -> list[nn.Parameter]:
        """The critic's head."""
        return list(self.value_head.parameters())

    # Action convention.
    def set_statistics(self, state_mean: Tensor, state_std: Tensor, action_mean: Tensor, action_std: Tensor) -> None:
        """Stores the normalisation, each float32 (dimensions,): of states, and of `relative` actions."""
        for name, value in [
            ("state_mean", state_mean),
            ("state_std", state_std),
            ("action_mean", action_mean),
            ("action_std", action_std),
        ]:
            if value.shape != (self.config.action_dimensions,) or not bool(torch.isfinite(value).all()):
                raise ValueError(
                    f"{name}: expected {self.config.action_dimensions} finite numbers; got {tuple(value.shape)} {value}"
                )
            if name.endswith("std") and not bool((value > 0).all()):
                raise ValueError(f"{name}: expected positive numbers; got {value}. Floor constant dimensions.")
            getattr(self, name).copy_(value)

    def relative(self, targets: Tensor, state: Tensor) -> Tensor:
        """Absolute targets (B, actions, dimensions) to deltas to `state` (B, dimensions); grippers stay absolute."""
        return targets - (state * self.delta_mask)[:, None]

    def absolute(self, relative: Tensor, state: Tensor) -> Tensor:
        """The inverse of `relative`."""
        return relative + (state * self.delta_mask)[:, None]

    def normalise_actions(self, targets: Tensor, state: Tensor) -> Tensor:
        """Absolute targets to what the flow generates."""
        return (self.relative(targets, state) - self.action_mean) / self.action_std

    def denormalise_actions(self, normalised: Tensor, state: Tensor) -> Tensor:
        """The inverse of `normalise_actions`."""
        return self.absolute(normalised * self.action_std + self.action_mean, state)

    # Parts of the forward pass.
    def encode(self, observation: PolicyObservation) -> Prefix:
        """The prefix of a batch of observations; checked first."""
        config = self.config
        check_observation(observation, config.image_height, config.image_width, config.action_dimensions)
        tokens = tokenize(observation.instructions, config.instruction_tokens, config.instruction_vocabulary)
        state = (observation.state - self.state_mean) / self.state_std
        return self.prefix(observation.images, state, tokens.to(state.device))

    def velocity(self, x: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        """v at x (B, actions, dimensions) and time (B,), whatever the expert predicts."""
        output = self.expert(x, time, prefix)
        if self.config.prediction == "velocity":
            return output
        return (x - output) / time[:, None, None]

    def _value(self, prefix: Prefix) -> Tensor:
        hidden = prefix.hidden.detach() if self.config.value_detached else prefix.hidden
        weight = prefix.valid[..., None].to(hidden.dtype)
        features = (hidden * weight).sum(1) / weight.sum(1)
        if self.config.value_input == "prefix_tokens":
            features = torch.cat([features, hidden[:, self.config.image_tokens]], dim=-1)
        return self.value_head(features)[:, 0]

    def _times(self) -> Tensor:
        """t of each denoise step, (steps,): one table, so that acting and evaluating use the same float32 numbers."""
        steps = self.config.denoise_steps
        return torch.tensor([1.0 - number / steps for number in range(steps)], device=self.state_mean.device)

    def _shape_noise(self, white: Tensor) -> Tensor:
        """White noise (B, actions, dimensions) on the CPU to the stochastic step's."""
        config = self.config
        if config.noise_modes:
            return smooth_noise(white, config.noise_modes, self.delta_mask.cpu())
        return correlate(white, config.noise_correlation)

    def _density(self, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Log-probabilities of the stochastic step, (B, actions), or (B, modes) with `noise_modes`."""
        config = self.config
        if config.noise_modes:
            return mode_log_probabilities(x, mean, std, config.noise_modes, self.delta_mask)
        return log_probabilities(x, mean, std, config.noise_correlation)

    # What trainers call.
    @torch.no_grad()
    def act(
        self,
        observation: PolicyObservation,
        generators: Sequence[torch.Generator],
        mode: Literal["sample", "mean"] = "sample",
    ) -> PolicySample:
        """One action chunk a sample.

        Args:
            observation: B observations.
            generators: B CPU generators, one a sample: its draws depend on nothing else in the batch. Each gives the
                initial noise, then in mode "sample" the step that is stochastic and that step's noise.
            mode: "sample", or "mean": the initial noise is drawn all the same, and every step is deterministic.
        """
        batch, config = len(observation), self.config
        if len(generators) != batch:
            raise ValueError(f"generators: expected one a sample, {batch}; got {len(generators)}")
        if mode not in ("sample", "mean"):
            raise ValueError(f"mode: expected 'sample' or 'mean'; got {mode!r}")
        shape = (config.chunk_actions, config.action_dimensions)
        x = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
        x = correlate(x, config.flow_noise_correlation)
        index = torch.full((batch,), -1, dtype=torch.int64)
        noise = torch.zeros_like(x)
        if mode == "sample":
            steps = torch.tensor(config.noise_steps)
            for row, generator in enumerate(generators):
                index[row] = steps[torch.randint(len(steps), (), generator=generator)]
                noise[row] = torch.randn(shape, generator=generator)
            noise = self._shape_noise(noise)
        device = self.state_mean.device
        x, index, noise = x.to(device), index.to(device), noise.to(device)
        prefix = self.encode(observation)
        chain = torch.zeros(batch, 2, *shape, device=device)
        density = torch.zeros(batch, config.noise_modes or config.chunk_actions, device=device)
        step = 1.0 / config.denoise_steps
        for number in range(config.denoise_steps):
            time = self._times()[number].expand(batch)
            velocity = self.velocity(x, time, prefix)
            after = x - step * velocity
            drawn = index == number
            if bool(drawn.any()):
                mean, std = step_moments(x, velocity, time, step, config.noise_level)
                stochastic = mean + std[:, None, None] * noise
                after = torch.where(drawn[:, None, None], stochastic, after)
                chain = torch.where(drawn[:, None, None, None], torch.stack([x, after], dim=1), chain)
                terms = self._density(after, mean, std)
                density = torch.where(drawn[:, None], terms, density)
            x = after
        actions = self.denormalise_actions(x, observation.state)
        if not bool(torch.isfinite(actions).all()):
            raise FloatingPointError(
                "policy.act: the actions contain NaN or infinity. The weights have diverged: lower the learning rate, "
                "or go back to an earlier checkpoint."
            )
        return PolicySample(actions, chain, index, density, self._value(prefix))

    def evaluate_sample(
        self, observation: PolicyObservation, sample: PolicySample, prefix: Prefix | None = None
    ) -> PolicyEvaluation:
        """Density of `sample`'s stochastic step, and the value, under the present weights and with gradient.

        `prefix` is `encode(observation)` where the caller has kept it, as it may while the prefix is frozen.
        """
        if bool((sample.denoise_index < 0).any()):
            raise ValueError(
                "sample.denoise_index: expected a stochastic step in every sample; got -1, as mode 'mean' gives. "
                "Collect with act(..., mode='sample')."
            )
        config = self.config
        step = 1.0 / config.denoise_steps
        time = self._times()[sample.denoise_index]
        prefix = self.encode(observation) if prefix is None else prefix
        before, after = sample.chain[:, 0], sample.chain[:, 1]
        mean, std = step_moments(before, self.velocity(before, time, prefix), time, step, config.noise_level)
        return PolicyEvaluation(self._density(after, mean, std), self._value(prefix))

    def value(self, observation: PolicyObservation, prefix: Prefix | None = None) -> Tensor:
        """The critic alone: (B,). `prefix` as in `evaluate_sample`."""
        return self._value(self.encode(observation) if prefix is None else prefix)

    def flow_matching_loss(
        self,
        observation: PolicyObservation,
        target_actions: Tensor,
        generator: torch.Generator,
        action_is_pad: Tensor | None = None,
        draws: int = 1,
    ) -> Tensor:
        """Mean squared error of the velocity (Lipman et al. 2023), a scalar with gradient.

        Args:
            observation: B observations.
            target_actions: float32 (B, actions, dimensions), absolute targets.
            generator: draws noise and flow times.
            action_is_pad: bool (B, actions); padded actions carry no loss.
            draws: noises and times a sample. The prefix is computed once, so more cost little.
        """
        target = self.normalise_actions(target_actions, observation.state).repeat_interleave(draws, 0)
        prefix = self.encode(observation)
        if draws > 1:
            prefix = prefix.repeat(draws)
        noise = torch.randn(target.shape, generator=generator).to(target)
        noise = correlate(noise, self.config.flow_noise_correlation)
        # Beta(a, 1) is u^(1 / a).
        uniform = torch.rand(target.shape[0], generator=generator).to(target)
        time = _TIME_FLOOR + (1.0 - _TIME_FLOOR) * uniform ** (1.0 / _TIME_ALPHA)
        start = torch.rand(target.shape[0], generator=generator).to(target) < self.config.start_share
        time = torch.where(start, torch.ones_like(time), time)
        x = time[:, None, None] * noise + (1.0 - time)[:, None, None] * target
        output = self.expert(x, time, prefix)
        if self.config.prediction == "velocity":
            error = (output - (noise - target)) ** 2
        else:
            error = ((output - target) / time.clamp(min=_WEIGHT_FLOOR)[:, None, None]) ** 2
        if action_is_pad is None:
            return error.mean()
        weight = (~action_is_pad).to(error.dtype).repeat_interleave(draws, 0)[..., None].expand_as(error)
        return (error * weight).sum() / weight.sum().clamp(min=1.0)
