"""Every fault found by its probe on the real simulator and the shipped world model, and no false alarm in clean runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worldserve.contract.command import main
from worldserve.serving.launcher import Launcher


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("name", "command", "arguments"),
    [
        ("simulator", "serve-sim", ["--workers", "1"]),
        ("world model", "serve-wm", ["--weights", "weights/bwm-mini"]),
    ],
)
def test_the_matrix(name: str, command: str, arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "matrix.json"
    with Launcher(tmp_path / "logs") as launcher:
        reward = launcher.start("reward", ["serve-reward", "--bind", "127.0.0.1:0"])
        bound = ["--bind", "127.0.0.1:0", "--reward", reward.address]
        server = launcher.start(command, [command, *bound, *arguments])
        assert main(["matrix", f"{name}={server.address}", "--out", str(out), "--clean", "20"]) == 0
    found = json.loads(out.read_text())["targets"][name]
    assert (found["missed"], found["false_alarms"]) == ([], [])
    assert len(found["clean_runs"]) == 20
    assert len(found["faults"]) == 26
