"""Hand views: an object looks the same from the hand wherever hand and object stand together."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.sim_server.tabletop.parameters import CameraSettings
from services.wm_server.camera import CameraConfig
from services.wm_server.hand_views import VIEW_PIXEL_M, VIEW_PIXELS, HandViews
from services.wm_server.windows import PoseStatistics

HEIGHT, WIDTH = 96, 128
OBJECT_HEIGHT_M = CameraConfig().object_height_m


def views() -> HandViews:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        made = HandViews(CameraConfig(), features=8)
    statistics = PoseStatistics.workspace()
    made.low.copy_(torch.from_numpy(statistics.low))
    made.high.copy_(torch.from_numpy(statistics.high))
    return made


def downward_hand(x_m: float, y_m: float, yaw_rad: float = 0.0) -> torch.Tensor:
    """(1, 1, 10): tool centre over (x, y), fingers along `yaw_rad`."""
    pose = [x_m, y_m, 0.95, 0.0, 0.0, -1.0, math.cos(yaw_rad), math.sin(yaw_rad), 0.0, 1.0]
    return torch.tensor([[pose]])


def frame_with_bar(x_m: float, y_m: float, yaw_rad: float) -> torch.Tensor:
    """(1, 3, 96, 128): a blurred bar 4 cm long, lying at (x, y) at the objects' height, as the camera sees it."""
    along = np.array([math.cos(yaw_rad), math.sin(yaw_rad)])
    places = np.array([x_m, y_m]) + np.linspace(-0.02, 0.02, 60)[:, None] * along
    points = np.column_stack([places, np.full(60, OBJECT_HEIGHT_M)])
    pixels = CameraSettings.named("default").project(points)
    rows, columns = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    distance = np.hypot(columns[..., None] - pixels[:, 0], rows[..., None] - pixels[:, 1]).min(-1)
    return torch.from_numpy(np.exp(-0.5 * (distance / 1.5) ** 2).astype(np.float32)).expand(1, 3, -1, -1)


def centre_m(view: torch.Tensor) -> tuple[float, float]:
    """Centre of mass of a view (3, 20, 20), along and across the fingers."""
    weights = view[0] / view[0].sum()
    steps = (torch.arange(VIEW_PIXELS) - (VIEW_PIXELS - 1) / 2) * VIEW_PIXEL_M
    return float((weights.sum(1) * steps).sum()), float((weights.sum(0) * steps).sum())


@pytest.mark.parametrize(
    ("hand_x_m", "hand_y_m", "yaw_rad", "along_m", "across_m"),
    [
        (0.10, -0.10, 0.0, 0.0, 0.0),
        (0.10, -0.10, 0.5, 0.0, 0.0),
        (-0.15, -0.05, 0.0, 0.0, 0.0),
        (0.10, -0.10, 0.0, 0.02, 0.0),
        (0.10, -0.10, 0.0, 0.0, -0.02),
        (0.10, -0.10, 0.5, 0.02, 0.0),
        (-0.15, -0.05, -0.4, 0.0, 0.02),
    ],
)
def test_an_object_is_seen_where_it_lies_from_the_hand(
    hand_x_m: float, hand_y_m: float, yaw_rad: float, along_m: float, across_m: float
) -> None:
    """A bar across the fingers, displaced from the tool centre by known millimetres in the hand's own frame."""
    along = np.array([math.cos(yaw_rad), math.sin(yaw_rad)])
    across = np.array([-along[1], along[0]])
    bar = np.array([hand_x_m, hand_y_m]) + along_m * along + across_m * across
    frame = frame_with_bar(bar[0], bar[1], yaw_rad + math.pi / 2)
    view = views().views(downward_hand(hand_x_m, hand_y_m, yaw_rad), frame)[0, 0]
    seen_along_m, seen_across_m = centre_m(view)
    assert seen_along_m == pytest.approx(along_m, abs=0.003)
    assert seen_across_m == pytest.approx(across_m, abs=0.003)


def test_the_same_grasp_elsewhere_is_the_same_view() -> None:
    here = views().views(downward_hand(0.10, -0.10, 0.3), frame_with_bar(0.10, -0.10, 0.3 + math.pi / 2))
    there = views().views(downward_hand(-0.12, -0.02, -0.2), frame_with_bar(-0.12, -0.02, -0.2 + math.pi / 2))
    missed = views().views(downward_hand(0.10, -0.10, 0.3), frame_with_bar(0.13, -0.10, 0.3 + math.pi / 2))
    assert float((here - there).abs().mean()) < 0.3 * float((here - missed).abs().mean())


def test_what_the_view_does_not_show_is_in_the_numbers() -> None:
    hand = downward_hand(0.1, -0.1)
    expected = [10.0 * (0.95 - 0.12 - OBJECT_HEIGHT_M), 0.0, 0.0, -1.0, 0.0, 1.0]
    np.testing.assert_allclose(views().numbers(hand)[0, 0], expected, atol=1e-6)


def test_every_group_of_four_actions_has_features_of_both_hands() -> None:
    poses = np.zeros((2, 52, 20), np.float32)
    for start, x in ((0, -0.3), (10, 0.3)):
        poses[..., start : start + 10] = downward_hand(x, -0.1)[0, 0].numpy()
    poses[1, 32:, 10] = 0.1  # from the 33rd action on, the right hand is elsewhere in the second window
    conditioning = torch.from_numpy(PoseStatistics.workspace().normalise(poses))
    anchor = torch.rand(2, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))
    anchor[1] = anchor[0]
    made = views()(conditioning, anchor)
    assert made.shape == (2, 13, 16)
    same = (made[0] - made[1]).abs() < 1e-6
    assert same[:, :8].all(), "the left hand did not move"
    assert same[:8].all(), "the eighth group ends with action 32"
    assert not same[8:, 8:].all(1).any()


def test_autocast_does_not_move_a_view() -> None:
    """As for pose maps: bf16 has 8 bits for a place in the frame."""
    hand, frame = downward_hand(0.1, -0.1), frame_with_bar(0.1, -0.1, 0.0)
    made = views()
    seen: list[torch.Tensor] = []
    made.see.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    conditioning = torch.from_numpy(
        PoseStatistics.workspace().normalise(np.tile(hand.numpy()[0], (1, 4, 2)).astype(np.float32))
    )
    with torch.no_grad():
        made(conditioning, frame)
        with torch.autocast("cpu", torch.bfloat16):
            made(conditioning, frame)
    assert seen[1].dtype == torch.float32
    assert torch.equal(seen[0], seen[1])
