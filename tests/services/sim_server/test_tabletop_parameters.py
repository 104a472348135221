"""Scene parameters and cameras."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from services.sim_server.tabletop import CameraSettings, SceneParameters

VALID = {"tag": 1, "bottle_model": 13, "x_m": 0.1, "y_m": -0.1, "yaw_rad": 0.2}


def test_draws_tag_model_x_y_yaw_in_this_order() -> None:
    generator = np.random.Generator(np.random.PCG64(42))
    tag = generator.integers(2)
    model = (13, 16)[generator.integers(2)]
    x = generator.uniform(0.08, 0.12) * (1 if tag == 1 else -1)
    expected = SceneParameters(int(tag), model, x, generator.uniform(-0.13, -0.08), generator.uniform(-0.4, 0.4))
    assert SceneParameters.from_seed(42) == expected


def test_spawn_distribution_covers_its_ranges_and_nothing_else() -> None:
    drawn = [SceneParameters.from_seed(seed) for seed in range(400)]
    assert {(scene.tag, scene.bottle_model) for scene in drawn} == {(0, 13), (0, 16), (1, 13), (1, 16)}
    for scene in drawn:
        assert 0.08 <= scene.side * scene.x_m <= 0.12
        assert -0.13 <= scene.y_m <= -0.08
        assert abs(scene.yaw_rad) <= 0.4
    assert max(scene.yaw_rad for scene in drawn) > 0.38
    assert min(scene.yaw_rad for scene in drawn) < -0.38


def test_survives_json_exactly() -> None:
    scene = SceneParameters.from_seed(5)
    assert SceneParameters.from_dict(json.loads(json.dumps(scene.to_dict()))) == scene


@pytest.mark.parametrize(
    ("name", "value"),
    [("tag", 2), ("bottle_model", 14), ("x_m", math.nan), ("x_m", 0.5), ("y_m", -0.4), ("yaw_rad", math.inf)],
)
def test_refuses_a_bad_value_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected .*; got"):
        SceneParameters.from_dict({**VALID, name: value})


def test_refuses_unknown_and_missing_names() -> None:
    with pytest.raises(ValueError, match=r"expected the names .* got .*'z_m'"):
        SceneParameters.from_dict({**VALID, "z_m": 0.7})


@pytest.mark.parametrize(("seed_tag", "arm"), [(0, "left"), (1, "right")])
def test_instruction_names_the_arm_on_the_bottles_side(seed_tag: int, arm: str) -> None:
    scene = SceneParameters(seed_tag, 16, 0.1 if arm == "right" else -0.1, -0.1, 0.0)
    assert f"{arm} arm" in scene.instruction
    assert "green" in scene.instruction


def test_robotwin_camera_looks_where_robotwin_says() -> None:
    camera = CameraSettings.named("robotwin", height_px=240, width_px=320)
    np.testing.assert_allclose(camera.axes(), [[0, -1, 0], [0.6, 0, 0.8], [-0.8, 0, 0.6]], atol=1e-12)
    on_axis = np.asarray(camera.eye_m) + 0.7 * camera.axes()[:, 0]
    np.testing.assert_allclose(camera.project(on_axis[None]), [[160, 120]], atol=1e-9)


def test_projection_has_rows_downward_and_columns_rightward() -> None:
    camera = CameraSettings.named("default")
    centre, right, up = camera.project(np.array([[0.0, -0.1, 0.935], [0.1, -0.1, 0.935], [0.0, -0.1, 1.035]]))
    np.testing.assert_allclose(centre, [64, 48], atol=1e-9)
    assert right[0] > centre[0]
    assert up[1] < centre[1]


def test_unknown_camera_is_refused() -> None:
    with pytest.raises(ValueError, match=r"camera: expected one of default, robotwin; got 'wrist'"):
        CameraSettings.named("wrist")
