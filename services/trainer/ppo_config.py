"""Settings of PPO. The recipes in recipes/ are sets of these, nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class PPOConfig:
    """PPO on a flow policy in a target: a simulator or a world model. Defaults are the study's corrected recipe."""

    recipe: str | None = None
    """A YAML file of settings, or the name of one in recipes/ (original, corrected, mini). Flags win over it."""
    target: str = "127.0.0.1:50051"
    """HOST:PORT of a simulator or a world model."""
    policy: Path = Path("weights/policy-sft")
    """Directory of the policy to start from."""
    out: Path = Path("runs/ppo")
    """Directory of this run."""
    resume: bool = False
    """Go on from the newest checkpoint in `out`."""
    initial_states: Path = Path("initial_states/train")
    """Sealed set of initial states to train on; test states are refused."""
    seed: int = 0
    """All randomness of the run follows from it."""
    threads: int = 1
    """CPU threads of torch."""

    # Rollout
    iterations: int = 14
    """Rollout-and-update rounds in total, warm-up included."""
    episodes_per_iteration: int = 96
    """Episodes collected before each update."""
    episodes_per_state: int = 1
    """Episodes of one iteration that share an initial state (and so a group baseline)."""
    batch: int = 64
    """Episodes open in the target at once."""
    policy_batch: int = 16
    """Observations in one policy call."""
    overlap: bool = True
    """Simulate one half of the batch while the policy acts for the other."""
    reward_source: Literal["verdict", "success"] = "verdict"
    """The reward model's verdict, or the simulator's ground truth."""
    max_failed_fraction: float = 0.05
    """The run stops when more of an iteration's episodes cannot be finished."""

    # Exploration: flow-SDE (see FlowPolicyConfig)
    noise_level: float = 0.3
    """`a` in sigma_t = a sqrt(t / (1 - t)) of the stochastic denoise step."""
    noise_steps: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Denoise steps among which the stochastic one is drawn, per sample; 0 is at t = 1."""
    noise_correlation: float = 0.0
    """Correlation of the noise between consecutive actions; near 1, a whole trajectory moves aside."""

    noise_modes: int = 0
    """Above 0: noise on the first so many smooth modes of a chunk, and their density (see FlowPolicyConfig); needs
    `ratio_level: chunk`."""

    # Returns
    gamma: float = 1.0
    """Discount a decision (a chunk)."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation (Schulman et al. 2016)."""
    limit_as: Literal["contract", "terminated", "truncated"] = "contract"
    """What reaching the limit means: as the target says, an end (value 0 beyond), or a cut (bootstrap V of the last
    observation)."""
    baseline: Literal["critic", "group"] = "critic"
    """"group": return minus the mean return of the other episodes of the same state; needs episodes_per_state >= 2."""
    normalize_advantages: bool = True
    """Zero mean and unit variance over the iteration's decisions."""

    # Policy loss
    ratio_level: Literal["chunk", "action"] = "chunk"
    """One probability ratio a chunk (log-probabilities summed), or one an action."""
    clip_low: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    """See clip_low; larger is "clip higher" (DAPO, arXiv 2503.14476)."""
    update_epochs: int = 5
    """Passes over an iteration's decisions."""
    minibatch_size: int = 96
    """Decisions an optimiser step."""
    microbatch_size: int = 32
    """Decisions a forward pass; gradients add up to the minibatch's."""
    learning_rate: float = 5e-6
    """Of the policy."""
    trainable: Literal["all", "expert"] = "expert"
    """"expert": the prefix (vision and language) stays as it is, which makes an update cheaper too."""
    max_grad_norm: float = 1.0
    """Gradient clipping, policy and critic apart."""
    target_kl: float | None = 0.05
    """An update's remaining minibatches are skipped once approx_kl exceeds 1.5 times this (none: never)."""
    max_ratio: float = 20.0
    """Alarm: an update stops, with a warning, before a step whose probability ratio exceeds this."""
    agreement_tolerance: float = 1e-3
    """Before the first update, rollout and training must agree to this: max |ratio - 1|, and values."""

    # Critic
    critic_warmup_iterations: int = 4
    """First iterations, which train the critic alone. Iterations, not optimiser steps."""
    value_learning_rate: float = 1e-5
    """Of the critic."""
    value_clip: float | None = 0.2
    """The value loss counts at most a change of this from the rollout's value (none: unclipped)."""
    huber_delta: float = 10.0
    """Value errors above this count linearly."""
    value_epochs: int | None = None
    """Passes of the critic (none: update_epochs). More than the policy's are run after it, on the critic alone."""

    checkpoint_every: int = 1
    """Iterations between checkpoints; the last is always written."""

    def __post_init__(self) -> None:
        decisions = {"iterations": self.iterations, "episodes_per_iteration": self.episodes_per_iteration}
        sizes = {"batch": self.batch, "policy_batch": self.policy_batch, "minibatch_size": self.minibatch_size}
        more = {"microbatch_size": self.microbatch_size, "update_epochs": self.update_epochs, "threads": self.threads}
        for name, count in {**decisions, **sizes, **more, "checkpoint_every": self.checkpoint_every}.items():
            if count < 1:
                raise ValueError(f"{name}: expected at least 1; got {count}")
        for name in ("learning_rate", "value_learning_rate", "huber_delta", "max_grad_norm", "noise_level"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: expected a positive number; got {value}")
        for name in ("gamma", "gae_lambda", "clip_low", "noise_correlation"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: expected a number in [0, 1]; got {getattr(self, name)}")
        if not 0 <= self.critic_warmup_iterations < self.iterations:
            raise ValueError(
                f"critic_warmup_iterations: expected 0 to iterations - 1 = {self.iterations - 1}, so that the policy "
                f"is trained at all; got {self.critic_warmup_iterations}"
            )
        if self.episodes_per_state < 1 or self.episodes_per_iteration % self.episodes_per_state:
            raise ValueError(
                f"episodes_per_state: expected a divisor of episodes_per_iteration ({self.episodes_per_iteration}); "
                f"got {self.episodes_per_state}"
            )
        if self.noise_modes and self.ratio_level != "chunk":
            raise ValueError(
                "ratio_level: expected 'chunk' with noise_modes, whose density is no single action's; got 'action'"
            )
        if self.baseline == "group" and self.episodes_per_state < 2:
            raise ValueError("episodes_per_state: expected at least 2 with --baseline group; got 1")
