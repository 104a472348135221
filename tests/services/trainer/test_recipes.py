"""Recipes: YAML as people write it, in the type of each setting; whatever else is named with its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.trainer.ppo_config import PPOConfig
from services.trainer.recipes import load_recipe, parse_command

ROOT = Path(__file__).parents[3]


def recipe(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("learning_rate: 5e-5", "learning_rate", 5e-5),  # text in YAML 1.1, which wants 5.0e-5
        ("learning_rate: 1", "learning_rate", 1.0),
        ('iterations: "7"', "iterations", 7),
        ("target_kl: null", "target_kl", None),
        ("target_kl: 1e-1", "target_kl", 0.1),
        ("value_epochs: 4", "value_epochs", 4),
        ("noise_steps: [0, 4]", "noise_steps", (0, 4)),
        ("overlap: false", "overlap", False),
        ("limit_as: truncated", "limit_as", "truncated"),
        ("policy: runs/sft/policy", "policy", Path("runs/sft/policy")),
    ],
)
def test_a_value_gets_its_settings_type(tmp_path: Path, text: str, name: str, value: Any) -> None:
    found = load_recipe(recipe(tmp_path, text), PPOConfig)
    assert found == {name: value}
    assert type(found[name]) is type(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("iterations: abc", "iterations: expected a whole number; got 'abc'"),
        ("iterations: 1.5", "iterations: expected a whole number; got 1.5"),
        ("iterations: true", "iterations: expected a whole number; got True"),
        ("learning_rate: fast", "learning_rate: expected a finite number; got 'fast'"),
        ("learning_rate: .nan", "learning_rate: expected a finite number; got nan"),
        ("learning_rate: null", "learning_rate: expected a finite number; got None"),
        ("target_kl: low", "target_kl: expected a finite number; got 'low'"),
        ("noise_steps: 4", "noise_steps: expected a list, each a whole number; got 4"),
        ("noise_steps: [0, x]", "noise_steps: expected a whole number; got 'x'"),
        ("overlap: 1", "overlap: expected true or false; got 1"),
        ("limit_as: never", "limit_as: expected one of 'contract', 'terminated', 'truncated'; got 'never'"),
        ("policy: 3", "policy: expected a path; got 3"),
        ("speed: 3\n1: 2", "expected a mapping from settings of PPOConfig; got ['1', 'speed']"),
        ("just words", "expected a mapping from settings of PPOConfig; got str 'just words'"),
        ("a: [", "expected YAML, `setting: value` a line"),
    ],
)
def test_what_is_no_setting_is_named_with_its_file(tmp_path: Path, text: str, said: str) -> None:
    path = recipe(tmp_path, text)
    with pytest.raises(ValueError) as caught:
        load_recipe(path, PPOConfig)
    assert str(caught.value).startswith(f"recipe {path}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["README.md", "weights/reward/model.safetensors"])
def test_a_file_that_is_no_recipe_ends_a_command_with_one_message(name: str) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_command(PPOConfig, ["--recipe", str(ROOT / name)], "worldserve ppo", "")
    assert f"worldserve ppo: recipe {ROOT / name}: expected" in str(caught.value)
