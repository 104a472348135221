"""Crashes, refusals and continued data sets."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="recorded episodes need the extra `episodes`")
pytest.importorskip("av", reason="recorded episodes need the extra `episodes`")

from worldserve.episodes import Episode, EpisodeReader, EpisodeWriter, layout, lazy, writer


def ids(directory: Path) -> list[str]:
    return [episode.episode_id for episode in EpisodeReader(directory)]


@pytest.mark.parametrize("stage", ["_write_frames", "_task_index", "_write_table", "_note", "_with_totals"])
@pytest.mark.parametrize("first", [True, False])
def test_an_error_in_the_middle_of_an_append_leaves_the_earlier_episodes(
    tmp_path, make_episode, monkeypatch, stage, first
) -> None:
    with EpisodeWriter(tmp_path) as episodes:
        if not first:
            episodes.append(make_episode(0))
        before = [] if first else ["episode-0"]
        with monkeypatch.context() as patch:

            def interrupt(*_: object, **__: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(EpisodeWriter, stage, interrupt)
            with pytest.raises(KeyboardInterrupt):
                episodes.append(make_episode(1))
        assert list(tmp_path.rglob(".*.tmp")) == []
        # `_with_totals` comes last for a continued set: the line is written, so the episode counts.
        if stage == "_with_totals" and not first:
            before.append("episode-1")
        assert ids(tmp_path) == before
        episodes.append(make_episode(2))
    assert ids(tmp_path) == [*before, "episode-2"]
    EpisodeReader(tmp_path).verify()


KILLED = """
import os, sys
import numpy as np
from worldserve.episodes import Episode, EpisodeWriter, layout

zeros = np.zeros((3, 14), np.float32)
def episode(name):
    return Episode(episode_id=name, initial_state_id="s", seed=0, instruction="i", requested_actions=zeros,
        executed_actions=zeros, proprioception=np.zeros((4, 14), np.float32), rewards=zeros[:, 0],
        frame_source=np.zeros((4, 16, 16, 3), np.uint8))

writer = EpisodeWriter(sys.argv[1])
writer.append(episode("kept"))
at = sys.argv[2]
append, replace = layout.append_json_line, os.replace
def dying_append(path, value, **keywords):
    if path.name == at:
        with open(path, "ab") as file:
            file.write(b'{"episode_index": 1, "torn')
        os._exit(9)
    append(path, value, **keywords)
def dying_replace(source, target):
    if str(target).endswith(at):
        os._exit(9)
    replace(source, target)
layout.append_json_line, os.replace = dying_append, dying_replace
writer.append(episode("lost"))
"""


@pytest.mark.parametrize("at", [".mkv", ".parquet", "episodes_stats.jsonl", "episodes.jsonl"])
def test_a_killed_process_leaves_a_readable_set_that_can_be_continued(tmp_path, make_episode, at) -> None:
    result = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), at], check=False, cwd=Path(__file__).parents[3]
    )
    assert result.returncode == 9
    assert ids(tmp_path) == ["kept"]
    with EpisodeWriter(tmp_path) as episodes:
        assert "kept" in episodes
        assert "lost" not in episodes
        frames = np.ones((8, 16, 16, 3), np.uint8)
        episodes.append(make_episode(5, frame_source=frames))
    assert ids(tmp_path) == ["kept", "episode-5"]
    np.testing.assert_array_equal(EpisodeReader(tmp_path)[1].frames, frames)
    assert [line["episode_index"] for line in layout.read_json_lines(tmp_path / layout.STATISTICS)[0]] == [0, 1]
    assert list(tmp_path.rglob(".*.tmp")) == []


def test_a_broken_line_before_the_last_is_an_error_not_a_shorter_set(tmp_path, make_episode) -> None:
    with EpisodeWriter(tmp_path) as episodes:
        episodes.append(make_episode(0))
        episodes.append(make_episode(1))
    path = tmp_path / layout.EPISODES
    path.write_text("garbage\n" + path.read_text().splitlines(keepends=True)[1])
    with pytest.raises(ValueError, match="line 1: expected one JSON object"):
        EpisodeReader(tmp_path)
    with pytest.raises(ValueError, match="line 1: expected one JSON object"):
        EpisodeWriter(tmp_path)


def test_a_second_writer_is_refused_until_the_first_closes(tmp_path) -> None:
    with EpisodeWriter(tmp_path):
        with pytest.raises(RuntimeError, match="another writer holds this data set"):
            EpisodeWriter(tmp_path)
    EpisodeWriter(tmp_path).close()


def test_an_id_is_recorded_once(tmp_path, make_episode) -> None:
    with EpisodeWriter(tmp_path) as episodes:
        episodes.append(make_episode(0))
        with pytest.raises(ValueError, match="'episode-0' is already in"):
            episodes.append(make_episode(0))
        assert len(episodes) == 1


def test_a_closed_writer_says_so(tmp_path, make_episode) -> None:
    episodes = EpisodeWriter(tmp_path)
    episodes.close()
    with pytest.raises(RuntimeError, match="closed"):
        episodes.append(make_episode(0))


def test_frames_of_another_size_are_refused(tmp_path, make_episode) -> None:
    with EpisodeWriter(tmp_path) as episodes:
        episodes.append(make_episode(0))
        with pytest.raises(
            ValueError, match=r"observation.images.head: expected shape \[24, 32, 3\].*got \[48, 32, 3\]"
        ):
            episodes.append(make_episode(1, frame_source=np.zeros((8, 48, 32, 3), np.uint8)))
    assert ids(tmp_path) == ["episode-0"]


def test_episodes_without_frames_say_so(tmp_path, make_episode) -> None:
    with EpisodeWriter(tmp_path) as episodes:
        episodes.append(make_episode(0, frame_source=None))
    with pytest.raises(ValueError, match="recorded without frames"):
        _ = EpisodeReader(tmp_path)[0].frames


def test_changed_pixels_are_found(tmp_path, make_episode) -> None:
    for name, number in (("a", 0), ("b", 1)):
        with EpisodeWriter(tmp_path / name) as episodes:
            episodes.append(make_episode(number))
    os.replace(layout.video_path(tmp_path / "b", 0), layout.video_path(tmp_path / "a", 0))
    with pytest.raises(ValueError, match="'episode-0': the frames are not the recorded ones"):
        EpisodeReader(tmp_path / "a").verify()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["requested_actions", "executed_actions", "proprioception", "rewards"])
def test_non_finite_numbers_are_refused(make_episode, name, bad) -> None:
    values = np.array(getattr(make_episode(), name))
    values.flat[3] = bad
    with pytest.raises(ValueError, match=f"{name}: expected finite numbers; got {bad}"):
        make_episode(**{name: values})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"executed_actions": np.zeros((7, 14))}, "executed_actions: expected float32.*got float64"),
        ({"requested_actions": np.zeros((6, 14), np.float32)}, r"requested_actions: expected \(7, 14\); got \(6, 14\)"),
        ({"executed_actions": np.zeros((0, 14), np.float32)}, "executed_actions: expected"),
        ({"proprioception": np.zeros((7, 14), np.float32)}, r"proprioception: expected \(8, 14\)"),
        ({"rewards": np.zeros((8,), np.float32)}, r"rewards: expected \(7,\)"),
        ({"frame_source": np.zeros((7, 4, 4, 3), np.uint8)}, r"frames: expected \(8, height, width, 3\)"),
        ({"frame_source": np.zeros((8, 4, 4, 3), np.float32)}, "frames: expected uint8"),
        ({"episode_id": ""}, "episode_id: expected a non-empty name"),
        ({"metadata": {"x": float("nan")}}, "metadata: expected JSON values"),
        ({"metadata": {"x": np.float32(1)}}, "metadata: expected JSON values"),
    ],
)
def test_a_malformed_episode_is_refused_by_name(make_episode, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_episode(**changes)


def test_no_data_set_is_not_an_empty_one(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no data set here"):
        EpisodeReader(tmp_path / "nowhere")


def test_a_missing_library_names_the_extra_that_brings_it() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'worldserve\[episodes\]'"):
        lazy.require("no_such_module", "nothing")


def test_episodes_are_made_by_one_class_for_writing_and_reading(tmp_path, make_episode) -> None:
    """What was read can be written again: the frames are copied, not decoded."""
    with EpisodeWriter(tmp_path / "a") as first:
        first.append(make_episode(0))
    episode: Episode = EpisodeReader(tmp_path / "a")[0]
    with EpisodeWriter(tmp_path / "b") as second:
        second.append(episode)
    assert layout.video_path(tmp_path / "a", 0).read_bytes() == layout.video_path(tmp_path / "b", 0).read_bytes()
    assert writer.DEFAULT_ACTION_PERIOD_MS == 60.0
