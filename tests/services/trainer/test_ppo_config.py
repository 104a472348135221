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
    assert changed == {"limit_as", "critic_warmup_iterations", "value_learning_rate", "iterations"}
    assert original.value_learning_rate == pytest.approx(20 * original.learning_rate)
    assert corrected.value_learning_rate == pytest.approx(original.value_learning_rate / 10)
    assert corrected.critic_warmup_iterations == 4
