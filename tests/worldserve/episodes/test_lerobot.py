"""A data set of ours in lerobot's own reader. It needs lerobot 0.3 (layout v2.1), in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.worldserve.episodes.conftest import MakeEpisode
from worldserve.episodes import EpisodeWriter

lerobot_dataset = pytest.importorskip(
    "lerobot.datasets.lerobot_dataset",
    reason="lerobot is not installed; it needs torchvision, so make an environment with `pip install 'lerobot==0.3.*'` "
    "and run this file there",
)


def test_lerobots_reader_gives_back_states_actions_and_pixels(tmp_path: Path, make_episode: MakeEpisode) -> None:
    episodes = [make_episode(number) for number in range(2)]
    with EpisodeWriter(tmp_path / "data") as writer:
        for episode in episodes:
            writer.append(episode)
    loaded = lerobot_dataset.LeRobotDataset("worldserve/test", root=tmp_path / "data", video_backend="pyav")
    assert (loaded.num_episodes, loaded.num_frames) == (2, sum(episode.action_count + 1 for episode in episodes))
    row = 0
    for episode in episodes:
        for index in range(episode.action_count + 1):
            item = loaded[row]
            np.testing.assert_array_equal(item["observation.state"].numpy(), episode.proprioception[index])
            action = episode.executed_actions[min(index, episode.action_count - 1)]
            np.testing.assert_array_equal(item["action"].numpy(), action)
            pixels = np.round(item["observation.images.head"].numpy().transpose(1, 2, 0) * 255).astype(np.uint8)
            np.testing.assert_array_equal(pixels, episode.frames_at([index])[0])
            assert item["task"] == episode.instruction
            row += 1
