"""The page about a study: every figure of the files is on it, the criterion is checked, and it needs nothing else."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from services.trainer import report
from services.trainer.study_record import FROZEN
from tests.services.trainer.study_results import interval, write_frozen, write_run
from tests.services.trainer.test_report import _Page
from worldserve.episodes import write_mp4


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A finished study of two factors over two seeds."""
    directory = tmp_path / "results" / "hand"
    levels = {"original": (False, False), "a": (True, False), "b": (False, True), "corrected": (True, True)}
    write_frozen(directory, levels)
    write_run(directory, "sft", 0, 10)
    for seed in (0, 1):
        write_run(directory, "original", seed, 9 + seed)
        write_run(directory, "a", seed, 12 + seed)
        write_run(directory, "b", seed, 11 + seed)
        write_run(directory, "corrected", seed, 15 + seed, excess_high=0.08)
    return directory


def page_of(results: Path, *options: str) -> _Page:
    runs = results.parents[1] / "runs"
    assert report.main([str(results), "--runs", str(runs), *options]) == 0
    return _Page((runs / "hand" / "report.html").read_text(encoding="utf-8"))


def test_the_studys_table_stands_beside_ours(results: Path) -> None:
    text = page_of(results).text
    assert "+11.6 +11.1 +7.4 +14.4 +3.9; mean +9.7, SD 4.0" in text
    assert "+25.0 +30.0; mean +27.5" in text
    assert "SD 3.5; lower bounds above 0: 2 of 2; mismatch 0.20 0.20" in text
    assert "-5.0 +0.0" in text  # the original recipe's
    assert "not run" in text  # arms that this study does not have


def test_gains_effects_mismatch_and_cost_are_shown_with_intervals(results: Path) -> None:
    page = page_of(results)
    for part in (
        "corrected--mended--seed-1", "80.0%", "0.20 [0.10, 0.30] of 305", "+0.02 [-0.02, +0.08]", "a x b",
        "+17.5 [", "10.0", "90% intervals", "Settings of the arms", "learning_rate",
    ):  # fmt: skip
        assert part in page.text, part
    assert page.tags.count("svg") == 2 + 4  # gains, effects, and success curves of four arms


def test_the_criterion_is_the_frozen_one_and_is_checked(results: Path) -> None:
    text = page_of(results).text
    assert "Criterion: met" in text
    assert "every gain > 0 pp" in text
    assert "Frozen on 2026-11-30 at commit 0123456789ab" in text
    assert "The hash and every run agree with it." in text
    frozen = json.loads((results / FROZEN).read_text())
    frozen["criterion"]["sd_below_pp"] = 70.0
    (results / FROZEN).write_text(json.dumps(frozen))
    assert "is not what its SHA-256 was taken of" in page_of(results).text


def test_a_criterion_that_is_missed_says_so(results: Path) -> None:
    write_run(results, "corrected", 1, 8, excess_high=0.3)
    text = page_of(results).text
    assert "Criterion: not met" in text
    assert "least -10.0 over 2 of 2 seeds" in text
    assert "largest +0.300 over 2 of 2 seeds" in text


def test_a_study_that_has_begun_has_a_page(results: Path) -> None:
    for path in results.glob("*seed*.jsonl"):
        path.unlink()
    text = page_of(results).text
    assert "Criterion: open" in text
    assert "No trained run is finished yet." in text


def test_forks_are_shown_beside_the_studys(results: Path, tmp_path: Path) -> None:
    directory = tmp_path / "forks"
    directory.mkdir()
    stored = {
        "split": "train",
        "mixed": {"fake_success": interval(0.21, 0.1, 0.3), "above_floor": interval(0.09, 0.0, 0.2)},
    }
    (directory / "result.json").write_text(json.dumps(stored))
    text = page_of(results, "--forks", str(directory)).text
    assert "train states" in text
    assert "0.21 [0.10, 0.30]" in text
    assert "29% (old world model) and 40% (new)" in text


def test_exploits_are_embedded_whole_and_the_page_needs_nothing_else(results: Path, tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "hand" / "corrected--mended--seed-0" / "exploits"
    directory.mkdir(parents=True)
    write_mp4(directory / "00.mp4", np.zeros((5, 16, 32, 3), np.uint8))
    (directory / "videos.json").write_text(json.dumps([{"video": "00.mp4", "caption": "an <exploit>"}]))
    page = page_of(results)
    assert "an <exploit>" in page.text  # escaped in the source, read back here
    [video] = [address for address in page.addresses if address.startswith("data:video/mp4")]
    assert base64.b64decode(video.partition(",")[2]) == (directory / "00.mp4").read_bytes()
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert "script" not in page.tags
    assert "link" not in page.tags


def test_the_same_files_give_the_same_page(results: Path) -> None:
    runs = results.parents[1] / "runs" / "hand" / "report.html"
    page_of(results)
    first = runs.read_bytes()
    page_of(results)
    assert runs.read_bytes() == first
