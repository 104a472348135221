"""The camera that the anchor frame was taken with, and poses of the hands undone from their normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


@dataclass(frozen=True)
class CameraConfig:
    """A pinhole camera that looks from a point to a point, upright, and the scene's heights that maps refer to."""

    eye_m: tuple[float, float, float] = (0.0, -0.8, 1.42)
    """Where it stands in the world (x right, y away, z up)."""
    target_m: tuple[float, float, float] = (0.0, -0.1, 0.935)
    """What it looks at."""
    vertical_field_of_view_rad: float = 0.6283185307179586
    """Angle over the frame's height."""
    tool_centre_m: float = 0.12
    """The tool centre, ahead of link 6."""
    finger_reach_m: float = 0.055
    """A finger tip's distance from the tool centre with the gripper open."""
    object_height_m: float = 0.765
    """Height of the middle of what lies on the table."""


def projection(camera: CameraConfig) -> NDArray[np.float64]:
    """(3, 4): world points (x, y, z, 1) in metres to (u w, v w, w); u right, v down, in half frame *heights*."""
    eye, target = np.array(camera.eye_m), np.array(camera.target_m)
    forward = (target - eye) / np.linalg.norm(target - eye)
    right = np.cross(forward, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    down = np.cross(forward, right)
    scale = 1.0 / np.tan(camera.vertical_field_of_view_rad / 2.0)
    rows = np.stack([scale * right, scale * down, forward])
    return np.concatenate([rows, -(rows @ eye)[:, None]], axis=1)


class PosesInCamera(nn.Module):
    """Base of what places the hands in the camera's frame: projection, and poses in metres.

    `low` and `high` are the poses' normalisation (`windows.PoseStatistics`), undone here.
    """

    projection: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, camera: CameraConfig) -> None:
        super().__init__()
        self.camera = camera
        self.register_buffer("projection", torch.from_numpy(projection(camera)).float())
        self.register_buffer("low", -torch.ones(20))
        self.register_buffer("high", torch.ones(20))

    def arms(self, conditioning: Tensor) -> Tensor:
        """(..., 20) normalised to (..., 2, 10): place (m), first column, second column, gripper (1 is open)."""
        low, high = self.low.float(), self.high.float()
        return (low + (conditioning.float() + 1.0) * (high - low) / 2.0).unflatten(-1, (2, 10))

    def seen_at(self, points: Tensor) -> Tensor:
        """World points (..., 3) in metres to (..., 2): right and down, in half frame heights from its centre."""
        camera = self.projection.float()
        homogeneous = points @ camera[:, :3].T + camera[:, 3]
        return homogeneous[..., :2] / homogeneous[..., 2:].clamp(min=0.05)
