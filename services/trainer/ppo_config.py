"""Settings of PPO. The recipes in recipes/ are sets of these, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from services.trainer.policy_gradient_config import PolicyGradientConfig, positive


@dataclass(frozen=True)
class PPOConfig(PolicyGradientConfig):
    """PPO on a flow policy in a target: a simulator or a world model. Defaults are the study's corrected recipe."""

    recipe: str | None = None
    """A YAML file of settings, or the name of one in recipes/ (original, corrected, mini). Flags win over it."""
    iterations: int = 14
    """Rollout-and-update rounds in total, warm-up included."""
    episodes_per_iteration: int = 96
    """Episodes collected before each update."""
    episodes_per_state: int = 1
    """Episodes of one iteration that share an initial state (and so a group baseline)."""

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

    # Critic
    value_input: Literal["prefix", "prefix_tokens", "expert"] | None = None
    """What the critic reads: the prefix (vision and language), its mean beside the state's token, or the action expert,
    whose output depends on the drawn noise (none: as the policy was saved). A critic of another input is drawn anew."""
    value_detached: bool = True
    """Whether the value loss trains the critic alone, or also what it reads."""
    value_rollout: Literal["same", "mean_over_steps"] = "same"
    """Expert-side critic: rollout and training values are the same function, or, as in RLinf, the rollout's is the mean
    over all denoise steps and training's that of one."""
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.episodes_per_iteration < 1:
            raise ValueError(f"episodes_per_iteration: expected at least 1; got {self.episodes_per_iteration}")
        for name in ("value_learning_rate", "huber_delta"):
            positive(name, getattr(self, name))
        for name in ("gamma", "gae_lambda"):
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
        if self.baseline == "group" and self.episodes_per_state < 2:
            raise ValueError("episodes_per_state: expected at least 2 with --baseline group; got 1")
        if not self.value_detached and self.trainable == "expert" and self.value_input != "expert":
            raise ValueError(
                "value_detached: expected true while the critic reads the prefix and the prefix is frozen (trainable "
                "'expert'); got false. Use --value-input expert, or --trainable all."
            )
        if self.value_rollout == "mean_over_steps" and (self.value_input != "expert" or self.exploration != "flow_sde"):
            raise ValueError(
                "value_rollout: expected 'same', unless the critic reads the expert (value_input) and one step is "
                "random (exploration 'flow_sde'); got 'mean_over_steps'"
            )

    def policy_settings(self) -> dict[str, Any]:
        """As in the base class, and what the critic reads."""
        critic = {"value_detached": self.value_detached, "value_rollout": self.value_rollout}
        chosen = {} if self.value_input is None else {"value_input": self.value_input}
        return super().policy_settings() | critic | chosen
