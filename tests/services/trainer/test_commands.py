"""Settings of a command: typed and checked before it starts, and the arguments that say them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tyro

from services.trainer.commands import SETTINGS, Command, find_command


@dataclass(frozen=True)
class Settings:
    """A command's settings of every kind."""

    data: tyro.conf.Positional[tuple[Path, ...]]
    out: Path = Path("runs/x")
    rate: float | None = 1e-3
    steps: tuple[int, ...] = (1, 2)
    fresh: bool = False
    name: str = ""
    more: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data: expected at least one directory; got none")


COMMAND = Command("x", Settings)


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"data": ["a", "b"]}, ["x", "a", "b"]),
        ({"data": ["a"], "rate": "5e-5", "steps": [4]}, ["x", "a", "--rate", "5e-05", "--steps", "4"]),
        ({"data": ["a"], "rate": None, "steps": []}, ["x", "a", "--rate", "None", "--steps"]),
        ({"fresh": True, "data": ["a"]}, ["x", "a", "--fresh"]),
        ({"fresh": False, "data": ["a"]}, ["x", "a", "--no-fresh"]),
        ({"data": ["a"], "more": ["p", "q"]}, ["x", "a", "--more", "p", "--more", "q"]),
        ({"data": ["a"], "out": "b c", "name": "n"}, ["x", "a", "--out", "b c", "--name", "n"]),
    ],
)
def test_arguments_say_what_the_settings_do(given: dict[str, Any], arguments: list[str]) -> None:
    checked = COMMAND.check(given)
    assert COMMAND.arguments(checked) == arguments
    # And the command line gives the same settings back.
    assert tyro.cli(Settings, args=arguments[1:]) == Settings(**checked)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "settings: expected data, which `worldserve x` needs; got none"),
        ({"data": []}, "settings: data: expected at least one directory; got none"),
        ({"data": ["a"], "rate": "fast"}, "settings: rate: expected a finite number; got 'fast'"),
        ({"data": ["a"], "speed": 1}, r"expected a mapping from settings of Settings; got \['speed'\]"),
    ],
)
def test_what_the_command_would_refuse_is_refused_before(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        COMMAND.check(given)


def test_a_recipe_is_read_with_the_settings_that_win_over_it() -> None:
    ppo = find_command("ppo")
    checked = ppo.check({"recipe": "mini", "iterations": 3})
    assert checked == {"recipe": "mini", "iterations": 3}
    assert ppo.recipe_settings(checked)["noise_steps"] == (4,)
    with pytest.raises(ValueError, match="critic_warmup_iterations"):
        ppo.check({"recipe": "mini", "iterations": 1})


def test_only_jobs_are_found() -> None:
    assert {"ppo", "sft", "evaluate", "collect", "mismatch", "fidelity"} <= set(SETTINGS)
    with pytest.raises(ValueError, match="command: expected one of collect"):
        find_command("serve-sim")
