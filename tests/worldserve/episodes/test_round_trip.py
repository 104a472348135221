"""What is written is what is read: every bit of every action and pixel, and every fact."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

pytest.importorskip("pyarrow", reason="recorded episodes need the extra `episodes`")
pytest.importorskip("av", reason="recorded episodes need the extra `episodes`")

from worldserve.contract import adjust_bottle, fingerprint
from worldserve.episodes import Episode, EpisodeReader, EpisodeWriter, frames_sha256, merge_episodes

ARRAYS = ("requested_actions", "executed_actions", "proprioception", "rewards")


def assert_same(read: Episode, written: Episode) -> None:
    for field in dataclasses.fields(Episode):
        if field.name in ARRAYS:
            got, expected = getattr(read, field.name), getattr(written, field.name)
            assert got.dtype == expected.dtype
            assert got.shape == expected.shape
            assert got.tobytes() == expected.tobytes(), field.name
        elif field.name != "frame_source":
            assert getattr(read, field.name) == getattr(written, field.name), field.name
    if written.frame_source is not None:
        np.testing.assert_array_equal(read.frames, written.frames)


def write(directory: Path, episodes: list[Episode]) -> None:
    with EpisodeWriter(directory) as writer:
        for episode in episodes:
            writer.append(episode)


def test_every_field_comes_back(tmp_path, make_episode) -> None:
    episodes = [
        make_episode(0),
        make_episode(1, success=False, verdict=None, end_reason="", terminated=False),
        make_episode(2, success=None, truncated=True, terminated=False),
        make_episode(3, frame_source=None),
        make_episode(4, contract=adjust_bottle("world_model", "bwm-mini", {"weights": "0f"})),
    ]
    write(tmp_path, episodes)
    reader = EpisodeReader(tmp_path)
    assert len(reader) == 5
    for read, written in zip(reader, episodes):
        assert_same(read, written)
    reader.verify()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=npst.arrays(np.float32, (2, 7, 14), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    rewards=npst.arrays(np.float32, (7,), elements=st.sampled_from([0.0, -0.0, 1.0, 1e-45, -3.4028235e38])),
)
def test_odd_floats_are_exact(tmp_path_factory, make_episode, actions, rewards) -> None:
    """Negative zeros, denormals and the largest numbers keep their bits."""
    directory = tmp_path_factory.mktemp("odd")
    episode = make_episode(
        requested_actions=actions[0], executed_actions=actions[1], frame_source=None, rewards=rewards
    )
    write(directory, [episode])
    assert_same(EpisodeReader(directory)[0], episode)


@pytest.mark.parametrize("size", [(24, 32), (96, 128), (25, 31), (300, 400)])
def test_frames_are_lossless_at_any_size(tmp_path, make_episode, size) -> None:
    frames = np.random.default_rng(5).integers(0, 256, (8, *size, 3), dtype=np.uint8)
    write(tmp_path, [make_episode(frame_source=frames)])
    np.testing.assert_array_equal(EpisodeReader(tmp_path)[0].frames, frames)


@pytest.mark.parametrize(
    "indices", [[0], [200], [199, 3, 3, 57], [*range(0, 201, 7)], [9, 10, 11, 19, 20, 30, 45], [50, 100, 150], []]
)
def test_random_access_gives_the_frames_asked_for_in_that_order(tmp_path, make_episode, indices) -> None:
    random = np.random.default_rng(3)
    frames = random.integers(0, 256, (201, 16, 16, 3), dtype=np.uint8)
    actions = random.normal(size=(200, 14)).astype(np.float32)
    episode = make_episode(
        requested_actions=actions,
        executed_actions=actions,
        proprioception=np.zeros((201, 14), np.float32),
        rewards=np.zeros(200, np.float32),
        frame_source=frames,
    )
    write(tmp_path, [episode])
    read = EpisodeReader(tmp_path)[0].frames_at(indices)
    np.testing.assert_array_equal(read, frames[np.array(indices, dtype=int)])
    np.testing.assert_array_equal(read, episode.frames_at(indices))


def test_a_frame_that_is_not_there_is_refused(tmp_path, make_episode) -> None:
    write(tmp_path, [make_episode()])
    for episode in (make_episode(), EpisodeReader(tmp_path)[0]):
        with pytest.raises(IndexError, match=r"expected 0\.\.7; got 8"):
            episode.frames_at([0, 8])


def test_rows_pair_frame_i_with_action_i_plus_one_and_the_last_is_padded(tmp_path, make_episode) -> None:
    import pyarrow.parquet as parquet

    episodes = [make_episode(0), make_episode(1)]
    write(tmp_path, episodes)
    table = parquet.read_table(tmp_path / "data/chunk-000/episode_000001.parquet").to_pydict()
    executed = episodes[1].executed_actions
    np.testing.assert_array_equal(np.array(table["action"], np.float32), np.vstack([executed, executed[-1:]]))
    assert table["action_is_pad"] == [False] * 7 + [True]
    assert table["reward"] == [*episodes[1].rewards.tolist(), 0.0]
    assert table["frame_index"] == list(range(8))
    assert table["index"] == list(range(8, 16))
    assert table["episode_index"] == [1] * 8
    assert table["task_index"] == [1] * 8
    np.testing.assert_allclose(table["timestamp"], np.arange(8) * 0.06, atol=1e-6)


def test_info_states_what_lerobot_looks_for(tmp_path, make_episode) -> None:
    write(tmp_path, [make_episode(0), make_episode(1), make_episode(2)])
    info = json.loads((tmp_path / "meta/info.json").read_text())
    assert info["codebase_version"] == "v2.1"
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 24, 2)
    assert info["fps"] == pytest.approx(1 / 0.06)
    assert info["features"]["observation.images.head"]["shape"] == [24, 32, 3]
    video = info["video_path"].format(episode_chunk=0, video_key="observation.images.head", episode_index=2)
    assert (tmp_path / video).is_file()
    statistics = [json.loads(line) for line in (tmp_path / "meta/episodes_stats.jsonl").read_text().splitlines()]
    assert [line["episode_index"] for line in statistics] == [0, 1, 2]
    assert np.shape(statistics[0]["stats"]["observation.images.head"]["mean"]) == (3, 1, 1)


def test_infos_tell_everything_but_the_arrays_and_contracts_are_kept_once(tmp_path, make_episode) -> None:
    episodes = [make_episode(0), make_episode(1)]
    write(tmp_path, episodes)
    info = EpisodeReader(tmp_path).infos[1]
    contract = episodes[1].contract
    assert info.interface_fingerprint == fingerprint(contract.interface)
    assert info.provenance_fingerprint == fingerprint(contract.provenance)
    assert info.frames_sha256 == frames_sha256(episodes[1].frames)
    assert info.total_reward == episodes[1].total_reward
    assert info.verdict == episodes[1].verdict
    assert len(list((tmp_path / "meta/contracts").iterdir())) == 1


def test_the_same_episodes_give_the_same_bytes(tmp_path, make_episode) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, [make_episode(0), make_episode(1)])
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(files) == 10
    for path in files:
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes(), path


def test_several_directories_read_as_one_and_merge_into_one(tmp_path, make_episode) -> None:
    episodes = [make_episode(number) for number in range(4)]
    write(tmp_path / "a", episodes[:2])
    write(tmp_path / "b", episodes[2:])
    united = EpisodeReader([tmp_path / "a", tmp_path / "b"])
    assert [episode.episode_id for episode in united] == [episode.episode_id for episode in episodes]
    assert [episode.seed for episode in united[1:3]] == [1, 2]
    assert united[-1].seed == 3
    assert united.by_id("episode-2").seed == 2
    assert "episode-3" in united
    assert merge_episodes([tmp_path / "a", tmp_path / "b"], tmp_path / "c") == 4
    assert merge_episodes([tmp_path / "a", tmp_path / "b"], tmp_path / "c") == 0
    for read, written in zip(EpisodeReader(tmp_path / "c"), episodes, strict=True):
        assert_same(read, written)
    with pytest.raises(ValueError, match="'episode-0' occurs twice"):
        EpisodeReader([tmp_path / "a", tmp_path / "c"])
