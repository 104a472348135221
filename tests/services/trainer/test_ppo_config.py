"""Settings of PPO: what is refused, and in what the recipes differ."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from services.trainer.ppo_config import PPOConfig
from services.trainer.recipes import load_recipe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"iterations": 4, "critic_warmup_iterations": 4},
            "critic_warmup_iterations: expected 0 to iterations - 1 = 3",
        ),
        ({"learning_rate": float("nan")}, "learning_rate: expected a positive number; got nan"),
        ({"gamma": 1.1}, "gamma"),
        ({"episodes_per_iteration": 10, "episodes_per_state": 4}, "a divisor of episodes_per_iteration"),
        ({"baseline": "group"}, "at least 2 with --baseline group"),
        ({"value_detached": False}, "expected true while the critic reads the prefix and the prefix is frozen"),
        ({"value_rollout": "mean_over_steps"}, "expected 'same', unless the critic reads the expert"),
        (
            {"value_rollout": "mean_over_steps", "value_input": "expert", "exploration": "flow_noise"},
            "and one step is random",
        ),
        ({"noise_modes": 2, "ratio_level": "action"}, "expected 'chunk' or 'element' with noise_modes"),
        ({"temperature": 0.0}, "temperature: expected a positive number; got 0"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**changes)


def test_recipes_differ_in_what_the_study_fixed() -> None:
    original = PPOConfig(**load_recipe("original", PPOConfig))
    corrected = PPOConfig(**load_recipe("corrected", PPOConfig))
    changed = {
        field.name
        for field in dataclasses.fields(PPOConfig)
        if getattr(original, field.name) != getattr(corrected, field.name)
    }
    critic = {"value_input", "value_rollout", "critic_warmup_iterations", "value_learning_rate"}
    assert changed == {"limit_as", *critic, "iterations"}
    assert (original.value_input, original.value_detached) == ("expert", True)
    assert (original.value_rollout, corrected.value_input) == ("mean_over_steps", "prefix")
    assert (original.limit_as, corrected.limit_as) == ("truncated", "terminated")
    assert original.value_learning_rate == pytest.approx(20 * original.learning_rate)
    assert corrected.value_learning_rate == pytest.approx(original.value_learning_rate / 10)
    assert corrected.critic_warmup_iterations == 4
