"""What defines one scene of the task: where the bottle lies, and through which camera it is seen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

# RoboTwin 2.0 `adjust_bottle`: table top and its spawn ranges. Metres, radians.
TABLE_TOP_Z_M = 0.74
SPAWN_ABS_X_M = (0.08, 0.12)
SPAWN_Y_M = (-0.13, -0.08)
SPAWN_ABS_YAW_RAD = 0.4
BOTTLE_MODELS = (13, 16)
TAG_LEFT, TAG_RIGHT = 0, 1
# Bounds within which a scene may be asked for: the spawn ranges plus a margin, so a typing error is refused
# while a study may still place the bottle a little outside.
_LIMITS = {"x_m": 0.3, "y_m": 0.25, "yaw_rad": math.pi}


@dataclass(frozen=True)
class SceneParameters:
    """One initial state of `adjust_bottle`; everything that varies between episodes.

    Attributes:
        tag: 0 the bottle lies left and the left arm lifts it, 1 right.
        bottle_model: 13 (brown cola, red cap) or 16 (green, white cap).
        x_m, y_m: centre of the bottle's body on the table, world frame.
        yaw_rad: rotation about the vertical; at 0 the head points straight at the centre line (along -x on the
            right, along +x on the left).
    """

    tag: int
    bottle_model: int
    x_m: float
    y_m: float
    yaw_rad: float

    def __post_init__(self) -> None:
        if self.tag not in (TAG_LEFT, TAG_RIGHT):
            raise ValueError(f"tag: expected 0 (left) or 1 (right); got {self.tag!r}")
        if self.bottle_model not in BOTTLE_MODELS:
            raise ValueError(f"bottle_model: expected one of {BOTTLE_MODELS}; got {self.bottle_model!r}")
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not math.isfinite(value) or abs(value) > limit:
                raise ValueError(f"{name}: expected a finite number within +-{limit:g}; got {value!r}")

    @classmethod
    def sample(cls, generator: np.random.Generator) -> SceneParameters:
        """Draws RoboTwin's spawn distribution, in its order: tag, model, x, y, yaw."""
        tag = int(generator.integers(2))
        bottle_model = BOTTLE_MODELS[int(generator.integers(len(BOTTLE_MODELS)))]
        x = float(generator.uniform(*SPAWN_ABS_X_M)) * (1.0 if tag == TAG_RIGHT else -1.0)
        y = float(generator.uniform(*SPAWN_Y_M))
        yaw = float(generator.uniform(-SPAWN_ABS_YAW_RAD, SPAWN_ABS_YAW_RAD))
        return cls(tag, bottle_model, x, y, yaw)

    @classmethod
    def from_seed(cls, seed: int) -> SceneParameters:
        """The scene of a seed: `sample` from `Generator(PCG64(seed))`."""
        return cls.sample(np.random.Generator(np.random.PCG64(seed)))

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> SceneParameters:
        """Reads the `scene` dict of an initial state; unknown or missing names are refused."""
        expected = {"tag", "bottle_model", "x_m", "y_m", "yaw_rad"}
        if set(values) != expected:
            raise ValueError(f"scene: expected the names {sorted(expected)}; got {sorted(values)}")
        return cls(
            int(values["tag"]),
            int(values["bottle_model"]),
            float(values["x_m"]),
            float(values["y_m"]),
            float(values["yaw_rad"]),
        )

    def to_dict(self) -> dict[str, float]:
        """The `scene` dict of an initial state; JSON keeps it exactly."""
        return asdict(self)

    @property
    def arm(self) -> str:
        """The arm on the bottle's side, "left" or "right"."""
        return "right" if self.tag == TAG_RIGHT else "left"

    @property
    def side(self) -> float:
        """+1 where the bottle and its goal lie at positive x, -1 at negative x."""
        return 1.0 if self.tag == TAG_RIGHT else -1.0

    @property
    def instruction(self) -> str:
        """The task in words; names the arm on the bottle's side."""
        colour = "brown" if self.bottle_model == 13 else "green"
        return f"Pick up the {colour} bottle with the {self.arm} arm and hold it upright."


@dataclass(frozen=True)
class CameraSettings:
    """A fixed pinhole camera.

    Attributes:
        name: recorded with the episodes.
        eye_m, target_m: where the camera is and what it looks at, world frame.
        vertical_field_of_view_rad: the whole angle.
        height_px, width_px: size of a frame.
    """

    name: str
    eye_m: tuple[float, float, float]
    target_m: tuple[float, float, float]
    vertical_field_of_view_rad: float
    height_px: int = 96
    width_px: int = 128

    @classmethod
    def named(cls, name: str, height_px: int = 96, width_px: int = 128) -> CameraSettings:
        """`default` (sees every success whole) or `robotwin` (RoboTwin's head camera, which does not)."""
        if name not in _CAMERAS:
            raise ValueError(f"camera: expected one of {', '.join(sorted(_CAMERAS))}; got {name!r}")
        eye, target, degrees = _CAMERAS[name]
        return cls(name, eye, target, math.radians(degrees), height_px, width_px)

    def axes(self) -> NDArray[np.float64]:
        """(3, 3): columns are the camera's forward, left and up directions in the world; no roll."""
        forward = np.subtract(self.target_m, self.eye_m)
        forward = forward / np.linalg.norm(forward)
        left = np.cross((0.0, 0.0, 1.0), forward)
        left = left / np.linalg.norm(left)
        return np.column_stack([forward, left, np.cross(forward, left)])

    def project(self, points_m: NDArray[np.float64]) -> NDArray[np.float64]:
        """World points (n, 3) to pixels (n, 2): column, row; outside the frame where they fall outside [0, size)."""
        local = (np.asarray(points_m, np.float64) - np.asarray(self.eye_m)) @ self.axes()
        focal_px = 0.5 * self.height_px / math.tan(0.5 * self.vertical_field_of_view_rad)
        column = 0.5 * self.width_px - focal_px * local[:, 1] / local[:, 0]
        row = 0.5 * self.height_px - focal_px * local[:, 2] / local[:, 0]
        return np.column_stack([column, row])


_CAMERAS: dict[str, tuple[tuple[float, float, float], tuple[float, float, float], float]] = {
    "default": ((0.0, -0.80, 1.42), (0.0, -0.10, 0.935), 36.0),
    # RoboTwin: at (-0.032, -0.45, 1.35), forward (0, 0.6, -0.8), 37 degrees.
    "robotwin": ((-0.032, -0.45, 1.35), (-0.032, 0.15, 0.55), 37.0),
}
