"""Pose maps: hands land where the camera sees them, and move with their poses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.sim_server.tabletop.parameters import CameraSettings
from services.wm_server.camera import CameraConfig, projection
from services.wm_server.pose_maps import CELL_PIXELS, PoseMaps
from services.wm_server.windows import PoseStatistics

HEIGHT, WIDTH = 96, 128


def maps() -> PoseMaps:
    made = PoseMaps(HEIGHT, WIDTH, CameraConfig(), channels=3)
    statistics = PoseStatistics.workspace()
    made.low.copy_(torch.from_numpy(statistics.low))
    made.high.copy_(torch.from_numpy(statistics.high))
    return made


def hands(x_m: float, gripper: float = 1.0) -> torch.Tensor:
    """Conditioning (1, 5, 20) of two hands that point straight down, the right one's link 6 at (x, -0.1, 0.95)."""
    poses = np.zeros((1, 5, 20), np.float32)
    for start, x in ((0, -0.3), (10, x_m)):
        poses[..., start : start + 10] = [x, -0.1, 0.95, 0.0, 0.0, -1.0, 1.0, 0.0, 0.0, gripper]
    return torch.from_numpy(PoseStatistics.workspace().normalise(poses))


def test_the_camera_is_the_simulators() -> None:
    points = np.random.default_rng(0).uniform((-0.3, -0.4, 0.75), (0.3, 0.1, 1.1), size=(40, 3))
    homogeneous = np.column_stack([points, np.ones(40)]) @ projection(CameraConfig()).T
    across = homogeneous[:, :2] / homogeneous[:, 2:]
    pixels = across * HEIGHT / 2 + [WIDTH / 2, HEIGHT / 2]
    np.testing.assert_allclose(pixels, CameraSettings.named("default").project(points), atol=1e-6)


def test_a_spot_moves_by_less_than_a_cell() -> None:
    """Two millimetres are a third of a pixel; the spot's centre of mass moves by as much."""
    made, rows = maps(), slice(None)
    centres = []
    for x_m in (0.100, 0.102):
        spot = made.spots(hands(x_m))[0, 0, 1, rows, made.columns // 2 :]  # the tool centre, right half
        columns = torch.arange(spot.shape[1]) + made.columns // 2 + 0.5
        centres.append(float((spot.sum(0) * columns).sum() / spot.sum()) * CELL_PIXELS)
    expected = np.diff(
        CameraSettings.named("default").project(np.array([[0.100, -0.1, 0.83], [0.102, -0.1, 0.83]]))[:, 0]
    )
    assert centres[1] - centres[0] == pytest.approx(float(expected[0]), rel=0.05)


def test_fingers_close() -> None:
    made = maps()
    open_, closed = (made.points(hands(0.1, gripper))[0][0, 0, 1, 2:4, 0] for gripper in (1.0, 0.0))
    assert float(open_[0] - open_[1]) == pytest.approx(0.12, abs=1e-6)
    assert float(closed[0] - closed[1]) == pytest.approx(0.01, abs=1e-6)


def test_shapes_and_the_anchor_is_read() -> None:
    made = maps()
    anchor = torch.zeros(1, 3, HEIGHT, WIDTH)
    one, other = made(hands(0.1), anchor), made(hands(0.1), anchor + 1.0)
    assert one.shape == (1, 16 * 3, 2, 6, 8)
    assert not torch.equal(one, other)


def test_autocast_does_not_move_a_spot() -> None:
    """Training under bf16 sees the spots that serving in fp32 draws; the convolutions after them may be bf16."""
    made, poses = maps(), hands(0.1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.matmul(poses, poses.mT).dtype == torch.bfloat16
        cast = made.spots(poses)
    assert cast.dtype == torch.float32
    assert torch.equal(cast, made.spots(poses))
