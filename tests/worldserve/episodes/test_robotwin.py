"""The importer of the real episodes: deltas become absolute targets; the two published episodes come through."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="recorded episodes need the extra `episodes`")
pytest.importorskip("av", reason="recorded episodes need the extra `episodes`")

from worldserve.episodes import EpisodeReader, import_robotwin
from worldserve.episodes.robotwin import absolute_targets
from worldserve.episodes.video import write_mp4

REAL = Path(__file__).parents[4] / "shared/data/robotwin_adjust_bottle"


def rows(count: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """States that wander, and actions as published: differences to the next row, grippers absolute."""
    states = np.random.default_rng(0).normal(size=(count, 26)).astype(np.float32)
    actions = np.zeros_like(states)
    actions[:-1] = states[1:] - states[:-1]
    actions[:-1, [6, 19]] = states[1:, [6, 19]]
    return states, actions


def test_targets_lead_to_the_next_row_in_our_order() -> None:
    states, actions = rows()
    expected = np.hstack([states[1:, :7], states[1:, 13:20]])
    np.testing.assert_allclose(absolute_targets(states, actions), expected, atol=1e-6)


def test_absolute_joints_are_not_taken_for_differences() -> None:
    states, actions = rows()
    actions[1, 2] += 0.01
    with pytest.raises(ValueError, match=r"misses by 0\.0"):
        absolute_targets(states, actions)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_rows_are_refused(bad: float) -> None:
    states, actions = rows()
    states[2, 25] = bad
    with pytest.raises(ValueError, match=r"observation\.state: expected finite"):
        absolute_targets(states, actions)


def publish(root: Path, frame_count: int = 5) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    states, actions = rows()
    (root / "data/chunk-000").mkdir(parents=True)
    (root / "videos/chunk-000").mkdir(parents=True)
    table = arrow.table({"observation.state": states.tolist(), "action": actions.tolist()})
    parquet.write_table(table, root / "data/chunk-000/episode_000007.parquet")
    ramp = np.linspace(0, 255, frame_count).astype(np.uint8)[:, None, None, None]
    write_mp4(root / "videos/chunk-000/episode_000007.mp4", np.broadcast_to(ramp, (frame_count, 48, 64, 3)))


def test_an_import_is_whole_and_is_not_repeated(tmp_path) -> None:
    publish(tmp_path / "published")
    ids = import_robotwin(tmp_path / "published", tmp_path / "set", height=24, width=32)
    assert ids == ["robotwin/adjust_bottle/episode_000007"]
    assert import_robotwin(tmp_path / "published", tmp_path / "set", height=24, width=32) == []
    (episode,) = EpisodeReader(tmp_path / "set")
    assert episode.frames.shape == (5, 24, 32, 3)
    assert episode.success is None
    np.testing.assert_allclose(episode.frames[:, 5, 5].mean(axis=-1), np.linspace(0, 255, 5), atol=12)


def test_a_video_of_another_length_is_refused(tmp_path) -> None:
    publish(tmp_path / "published", frame_count=4)
    with pytest.raises(ValueError, match="expected 5 frames"):
        import_robotwin(tmp_path / "published", tmp_path / "set")


def test_nothing_to_import_is_an_error(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected data/chunk-000/episode_000000\.parquet"):
        import_robotwin(tmp_path, tmp_path / "set")


def test_the_two_real_episodes(tmp_path) -> None:
    if not REAL.is_dir():
        pytest.skip(f"the real episodes are not beside this checkout ({REAL})")
    import_robotwin(REAL, tmp_path, height=96, width=128)
    reader = EpisodeReader(tmp_path)
    assert [info.length for info in reader.infos] == [143, 150]
    for episode, moving, resting in zip(reader, (7, 0), (0, 7)):
        state = episode.proprioception
        np.testing.assert_allclose(episode.executed_actions, state[1:], atol=1e-6)
        assert np.ptp(state[:, moving : moving + 6], axis=0).max() > 1.0
        assert np.ptp(state[:, resting : resting + 7]) <= 1.0  # still: joints 0, gripper 1
        assert episode.frames_at([0, 142]).shape == (2, 96, 128, 3)
    reader.verify()
