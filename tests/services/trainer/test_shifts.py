"""The floor: what half a pixel is, and what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from services.sim_server.tabletop.parameters import CameraSettings
from services.trainer.forks import ForksConfig
from services.trainer.shifts import half_pixel_shifts, measure_floor, summarise_floor
from tests.services.trainer.fork_world import ForkWorld, episode
from worldserve.episodes.initial_states import split_shifted_id

SHIFTS = half_pixel_shifts(3.24, 4.63)


def test_the_default_shifts_are_half_a_pixel_at_the_bottle() -> None:
    defaults = {field: ForksConfig.__dataclass_fields__[field].default for field in ("shift_x_mm", "shift_y_mm")}
    bottle, camera = np.array([0.1, -0.1, 0.75]), CameraSettings.named("default")
    x = np.array([1e-3 * defaults["shift_x_mm"], 0, 0])
    y = np.array([0, 1e-3 * defaults["shift_y_mm"], 0])
    at, right, away = camera.project(np.stack([bottle, bottle + x, bottle + y]))
    assert right[0] - at[0] == pytest.approx(0.5, abs=0.01)
    assert at[1] - away[1] == pytest.approx(0.5, abs=0.01)


def test_the_four_shifts_are_whole_micrometres() -> None:
    assert SHIFTS == {"+x": (3240, 0), "-x": (-3240, 0), "+y": (0, 4630), "-y": (0, -4630)}


def floor(episodes: Sequence[Any], world: ForkWorld, batch: int = 64) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    measure_floor(world, episodes, SHIFTS, 50, batch, rows.extend)
    return rows


def test_outcomes_are_the_simulators_own_unmoved_and_shifted() -> None:
    # The world succeeds while the tool's error stays below 5 mm; a shift in x adds its millimetres to the error.
    world = ForkWorld(limit_mm=5.0)
    rows = floor([episode(0, error_mm=0.0), episode(1, error_mm=3.0), episode(2, error_mm=7.0)], world)
    assert [row["unmoved"] for row in rows] == [True, True, False]
    assert rows[0]["shifted"] == {"+x": True, "-x": True, "+y": True, "-y": True}
    assert rows[1]["shifted"] == {"+x": False, "-x": True, "+y": True, "-y": True}
    assert rows[2]["shifted"] == {"+x": False, "-x": True, "+y": False, "-y": False}
    assert world.open_episodes == set()
    assert world.frames_drawn == 0


def test_rows_do_not_depend_on_the_batch() -> None:
    episodes = [episode(number, error_mm=float(number)) for number in range(7)]
    assert floor(episodes, ForkWorld(5.0), batch=1) == floor(episodes, ForkWorld(5.0), batch=64)


def row(state: str, unmoved: bool, flips: int, recorded: bool | None = None) -> dict[str, Any]:
    shifted = {name: unmoved ^ (number < flips) for number, name in enumerate(SHIFTS)}
    recorded = unmoved if recorded is None else recorded
    return {"initial_state_id": state, "recorded": recorded, "unmoved": unmoved, "shifted": shifted}


def test_flips_are_counted_over_all_over_failures_and_over_successes() -> None:
    rows = [row("a", False, 2), row("a", True, 1), row("b", True, 0), row("c", False, 0, recorded=True)]
    result = summarise_floor(rows, {"a"}, 0.9, 0)
    assert result["flip_rate"]["value"] == 3 / 16
    assert result["failure_to_success"]["value"] == 2 / 8
    assert result["success_to_failure"]["value"] == 1 / 8
    assert result["mixed"]["failure_to_success"]["value"] == 2 / 4
    assert result["single"]["flip_rate"]["value"] == 0
    assert result["flip_rate_by_direction"]["+x"]["value"] == 2 / 4
    assert (result["episodes"], result["states"], result["not_reproduced"]) == (4, 3, 1)


def test_a_rate_without_episodes_is_none() -> None:
    result = summarise_floor([row("a", True, 0)], {"a"}, 0.9, 0)
    assert result["failure_to_success"] is None
    assert result["single"]["flip_rate"] is None


def test_the_shifted_states_are_those_that_the_simulator_knows() -> None:
    world = ForkWorld(5.0)
    floor([episode(0)], world)
    shifts = [split_shifted_id(name)[1:] for name in world.states]
    assert sorted(shifts) == sorted([(0, 0), *SHIFTS.values()])
