import numpy as np
import pytest

from services.wm_server.windows import (
    PoseStatistics,
    build_window,
    conditioning_poses,
    mirror_poses,
    window_indices,
)
from worldserve.kinematics import end_effector_poses

STATISTICS = PoseStatistics(np.full(20, -2.0, np.float32), np.full(20, 2.0, np.float32))


def poses_by_number(count: int) -> np.ndarray:
    return np.repeat(np.arange(count, dtype=np.float32)[:, None] / 1000.0, 20, axis=1)


@pytest.mark.parametrize(
    ("t", "head", "tail"),
    [
        (0, [0] * 9 + [1, 2], [49, 50, 50, 50]),
        (3, [0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5], [52, 53, 53, 53]),
        (50, [0, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52], [99, 100, 100, 100]),
        (150, [0, 143, 144, 145, 146, 147, 148, 149, 150, 151, 152], [199, 200, 200, 200]),
    ],
)
def test_frames_of_a_window(t, head, tail):
    indices = window_indices(t).tolist()
    assert len(indices) == 61
    assert indices[:11] == head
    assert indices[-4:] == tail


@pytest.mark.parametrize("t", [0, 50, 100, 150])
def test_serving_sees_exactly_the_history_that_training_saw(t):
    frames = np.random.default_rng(0).integers(0, 256, (201, 4, 6, 3)).astype(np.uint8)
    poses = poses_by_number(201)
    known = {0: frames[0]} | {number: frames[number] for number in range(max(0, t - 7), t + 1)}
    training = build_window(frames, poses, t, STATISTICS, future=True)
    serving = build_window(known, poses[: t + 51], t, STATISTICS, future=False)
    assert training.pixels.shape == (61, 4, 6, 3)
    np.testing.assert_array_equal(serving.pixels, training.pixels[:9])
    np.testing.assert_array_equal(serving.conditioning, training.conditioning)


def test_padded_frames_repeat_action_50():
    window = build_window(np.zeros((201, 2, 2, 3), np.uint8), poses_by_number(201), 50, STATISTICS, future=True)
    np.testing.assert_array_equal(window.conditioning[59:], np.repeat(window.conditioning[58:59], 2, 0))
    assert (window.conditioning[58] != window.conditioning[57]).all()


def test_missing_actions_are_refused():
    with pytest.raises(ValueError, match="expected at least 101"):
        build_window(np.zeros((201, 2, 2, 3), np.uint8), poses_by_number(100), 50, STATISTICS, future=True)


def test_normalised_to_percentiles_and_clipped():
    statistics = PoseStatistics(np.array([0.0, 1.0], np.float32), np.array([2.0, 3.0], np.float32))
    values = statistics.normalise(np.array([[0.0, 3.0], [1.0, 2.0], [9.0, -9.0]], np.float32))
    np.testing.assert_array_equal(values, [[-1.0, 1.0], [0.0, 0.0], [1.0, -1.0]])


def test_euler_format_is_the_published_one():
    targets = np.random.default_rng(0).uniform(-0.5, 0.5, (5, 14)).astype(np.float32)
    np.testing.assert_allclose(conditioning_poses(targets, "euler"), end_effector_poses(targets), atol=1e-6)


def test_rotation_columns_are_unit_vectors_at_right_angles():
    targets = np.random.default_rng(0).uniform(-0.5, 0.5, (5, 14)).astype(np.float32)
    poses = conditioning_poses(targets, "rotation_columns")
    for start in (3, 13):
        forward, lateral = poses[:, start : start + 3], poses[:, start + 3 : start + 6]
        np.testing.assert_allclose(np.linalg.norm(forward, axis=1), 1.0, atol=1e-6)
        np.testing.assert_allclose((forward * lateral).sum(1), 0.0, atol=1e-6)
    np.testing.assert_array_equal(poses[:, [9, 19]], targets[:, [6, 13]])


def test_mirrored_poses_are_those_of_the_mirrored_arm():
    """Swapping the arms and turning joints 1, 5 and 6 round mirrors the robot, but for its bases' few millimetres."""
    targets = np.random.default_rng(1).uniform(0.1, 0.6, (6, 14)).astype(np.float32)
    swapped = np.concatenate([targets[:, 7:], targets[:, :7]], 1) * np.array([-1, 1, 1, 1, -1, -1, 1] * 2, np.float32)
    mirrored = mirror_poses(conditioning_poses(targets, "rotation_columns"))
    np.testing.assert_allclose(mirrored, conditioning_poses(swapped, "rotation_columns"), atol=0.08)
    np.testing.assert_array_equal(mirror_poses(mirrored), conditioning_poses(targets, "rotation_columns"))


def test_workspace_bounds_hide_nothing() -> None:
    """Where the expert never went is still told apart; percentiles with clipping show both hands in one place."""
    low, lower = np.zeros((2, 20), np.float32)
    low[2], lower[2] = 0.884, 0.858  # a hand at the lowest height of the expert's, and 26 mm lower
    expert = PoseStatistics(np.full(20, 0.884, np.float32), np.full(20, 1.062, np.float32))
    assert expert.normalise(low)[2] == expert.normalise(lower)[2] == -1.0
    workspace = PoseStatistics.workspace()
    assert workspace.normalise(low)[2] - workspace.normalise(lower)[2] == pytest.approx(2 * 0.026 / 0.4, abs=1e-6)
    assert workspace.normalise(np.full(20, 2.0, np.float32)).max() > 1.0


@pytest.mark.parametrize(("clip", "share"), [(True, 0.25), (False, 0.0)])
def test_clipped_share_counts_what_is_hidden(clip: bool, share: float) -> None:
    statistics = PoseStatistics(np.zeros(2, np.float32), np.ones(2, np.float32), clip)
    assert statistics.clipped_share(np.array([[0.5, 1.5], [0.0, 1.0]], np.float32)) == share
