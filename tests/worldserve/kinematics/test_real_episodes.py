"""Forward kinematics against the end-effector poses of two real RoboTwin episodes.

`tests/data/robotwin_kinematics.npz` holds every fourth frame of both (data of Boundless-World-Model, Apache-2.0): 13
numbers a frame and arm, joints 1-6 [rad], gripper, x y z [m], Euler x y z [rad]. With `../shared/data` there, every
frame is checked.
"""

from pathlib import Path

import numpy as np
import pytest

from worldserve.kinematics import arm_forward_kinematics, end_effector_poses, euler_xyz, rotation_from_rpy

REPOSITORY = Path(__file__).parents[3]
FIXTURE = REPOSITORY / "tests/data/robotwin_kinematics.npz"
REAL = REPOSITORY.parent / "shared/data/robotwin_adjust_bottle/data/chunk-000"
MEAN_LIMIT_MM, MAX_LIMIT_MM, ANGLE_LIMIT_DEG = 3.0, 7.0, 1.0


def errors(arm: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Position errors [mm] and angles [degrees] between forward kinematics and the recorded poses."""
    positions, rotations = arm_forward_kinematics(arm, rows[:, :6])
    recorded = np.array([rotation_from_rpy(*euler) for euler in rows[:, 10:13]])
    cosines = (np.einsum("nij,nij->n", rotations, recorded) - 1.0) / 2.0
    return np.linalg.norm(positions - rows[:, 7:10], axis=1) * 1e3, np.degrees(np.arccos(np.clip(cosines, -1.0, 1.0)))


def assert_met(arm: str, rows: np.ndarray) -> None:
    distance_mm, angle_deg = errors(arm, rows.astype(np.float64))
    assert distance_mm.mean() <= MEAN_LIMIT_MM
    assert distance_mm.max() <= MAX_LIMIT_MM
    assert angle_deg.max() <= ANGLE_LIMIT_DEG


@pytest.mark.parametrize(
    ("key", "arm"),
    [
        ("episode_40_moving", "right"),
        ("episode_40_resting", "left"),
        ("episode_41_moving", "left"),
        ("episode_41_resting", "right"),
    ],
)
def test_every_fourth_frame(key: str, arm: str) -> None:
    with np.load(FIXTURE) as fixture:
        assert_met(arm, fixture[key])


@pytest.mark.parametrize("key", ["episode_40_resting", "episode_41_resting"])
def test_home_is_met_to_a_hundredth_of_a_millimetre(key: str) -> None:
    arm = "left" if key.startswith("episode_40") else "right"
    with np.load(FIXTURE) as fixture:
        assert errors(arm, fixture[key].astype(np.float64))[0].max() < 0.01


@pytest.mark.parametrize(("key", "arm"), [("episode_40_moving", "right"), ("episode_41_moving", "left")])
def test_euler_angles_follow_the_convention_of_the_recorded_ones(key: str, arm: str) -> None:
    with np.load(FIXTURE) as fixture:
        rows = fixture[key].astype(np.float64)
    # Nearer a pitch of 90 degrees roll and yaw trade places; the rotation test above covers those frames.
    rows = rows[np.abs(rows[:, 11]) < 1.3]
    assert len(rows) >= 10
    difference = euler_xyz(arm_forward_kinematics(arm, rows[:, :6])[1]) - rows[:, 10:13]
    wrapped = (difference + np.pi) % (2.0 * np.pi) - np.pi
    assert np.abs(wrapped).max() < np.radians(ANGLE_LIMIT_DEG)


@pytest.mark.parametrize("episode", [40, 41])
def test_every_frame(episode: int) -> None:
    path = REAL / f"episode_{episode:06d}.parquet"
    if not path.exists():
        pytest.skip(
            f"the real episodes are not beside this checkout ({path}); the fixture above covers every 4th frame"
        )
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow reads the real episodes")
    states = np.array(parquet.read_table(path)["observation.state"].to_pylist())
    for arm, start in (("left", 0), ("right", 13)):
        assert_met(arm, states[:, start : start + 13])
    targets = states[:, [*range(7), *range(13, 20)]]
    poses = end_effector_poses(targets)
    recorded = states[:, [7, 8, 9, 10, 11, 12, 6, 20, 21, 22, 23, 24, 25, 19]]
    assert np.abs(poses - recorded)[:, [0, 1, 2, 7, 8, 9]].max() < 7e-3
    np.testing.assert_array_equal(poses[:, [6, 13]], recorded[:, [6, 13]])
