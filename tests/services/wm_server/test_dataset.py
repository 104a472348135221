"""Encoded windows are kept for the very episodes they were made of, and two processes may fill one directory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from services.wm_server import dataset
from services.wm_server.dataset import LatentWindows, WindowChoice, encode_windows, episode_poses
from services.wm_server.episodes import EpisodeSubset
from services.wm_server.windows import PoseStatistics, build_window, mirror_poses
from tests.services.wm_server.conftest import make_episode, make_model
from worldserve import files

FACTS: dict[str, Any] = {"episode_id": "made/0", "frames_sha256": "f", "success": True}


def encode(out: Path, infos: list[Any] | None = None, starts: tuple[int, ...] = (0,), mirror: bool = False) -> Path:
    class Reader(list):  # type: ignore[type-arg]
        infos: list[Any]

    reader = Reader([make_episode()])
    reader.infos = infos or [SimpleNamespace(**FACTS)]
    subset = EpisodeSubset(reader, [0])  # type: ignore[arg-type]
    choice = WindowChoice(starts=starts, mirror=mirror)
    args = (make_model().codec, PoseStatistics.workspace(), choice, "rotation_columns", out, 0, {"codec": "c"})
    (shard,) = encode_windows(subset, *args)
    return shard


@pytest.mark.parametrize(("change", "again"), [({}, False), ({"frames_sha256": "g"}, True), ({"success": False}, True)])
def test_episodes_recorded_anew_are_encoded_anew(tmp_path: Path, change: dict[str, Any], again: bool) -> None:
    shard = encode(tmp_path)
    assert json.loads((shard / "index.json").read_text())["key"]["episodes"] == [["made/0", "f", True]]
    before = (shard / "latents.npy").stat().st_ino
    assert encode(tmp_path, [SimpleNamespace(**{**FACTS, **change})]) == shard
    assert ((shard / "latents.npy").stat().st_ino != before) is again
    assert not list(tmp_path.glob(".*"))


def test_a_shard_that_another_process_made_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = encode(tmp_path / "other")
    real = os.replace
    target = tmp_path / "mine" / "shard_0000"

    def beaten(source: Any, destination: Any) -> None:
        if Path(destination) == target and Path(source).name.startswith(".") and other.exists():
            real(other, target)  # the other process was faster by a moment
        real(source, destination)

    monkeypatch.setattr(files.os, "replace", beaten)
    assert encode(tmp_path / "mine") == target
    assert dataset.is_encoded(target, json.loads((target / "index.json").read_text())["key"])
    assert not other.exists()
    assert not list(target.parent.glob(".*"))


@pytest.mark.parametrize("mirror", [False, True])
def test_training_remembers_the_chunks_that_serving_remembers(tmp_path: Path, mirror: bool) -> None:
    statistics, episode = PoseStatistics.workspace(), make_episode()
    windows = LatentWindows([encode(tmp_path, starts=(0, 50, 100, 150), mirror=mirror)], statistics)
    assert len(windows) == (8 if mirror else 4)
    poses = episode_poses(episode, "rotation_columns")
    batch = windows.batch(range(len(windows)))
    assert batch.past.shape == (len(windows), 3, 61, 20)
    for number, row in enumerate(windows.rows):
        known = episode.frames[:, :, ::-1] if row["mirrored"] else episode.frames
        moved = mirror_poses(poses) if row["mirrored"] else poses
        served = build_window(known, moved, row["t"], statistics, future=False)
        assert int(batch.chunks[number]) == len(served.past) == row["t"] // 50
        np.testing.assert_array_equal(batch.past[number, : len(served.past)].numpy(), served.past)
        assert not batch.past[number, len(served.past) :].any()
    assert len({batch.past[number, :, 9].numpy().tobytes() for number in range(len(windows))}) == len(windows) - mirror


def test_the_past_is_left_out_where_it_is_not_asked_for(tmp_path: Path) -> None:
    windows = LatentWindows([encode(tmp_path, starts=(0, 50, 100, 150))], PoseStatistics.workspace())
    whole, short = windows.batch([3, 0]), windows.batch([3, 0], past=False)
    assert (whole.past.shape, short.past.shape) == ((2, 3, 61, 20), (2, 0, 61, 20))
    for name in ("latents", "weights", "conditioning", "anchors", "chunks"):
        assert torch.equal(getattr(short, name), getattr(whole, name))
