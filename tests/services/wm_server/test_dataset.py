"""Encoded windows are kept for the very episodes they were made of, and two processes may fill one directory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.wm_server import dataset
from services.wm_server.dataset import WindowChoice, encode_windows
from services.wm_server.episodes import EpisodeSubset
from services.wm_server.windows import PoseStatistics
from tests.services.wm_server.conftest import make_episode, make_model
from worldserve import files

FACTS: dict[str, Any] = {"episode_id": "made/0", "frames_sha256": "f", "success": True}


def encode(out: Path, infos: list[Any] | None = None) -> Path:
    class Reader(list):  # type: ignore[type-arg]
        infos: list[Any]

    reader = Reader([make_episode()])
    reader.infos = infos or [SimpleNamespace(**FACTS)]
    subset = EpisodeSubset(reader, [0])  # type: ignore[arg-type]
    choice = WindowChoice(starts=(0,), mirror=False)
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
