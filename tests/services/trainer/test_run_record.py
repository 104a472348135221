"""A run's directory: what may follow what."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.run_record import RunRecord


def record(out: Path, resume: bool, **settings: object) -> None:
    RunRecord(out, {"seed": 0, "noise_steps": (4,), "out": out, "threads": 1} | settings, resume, {"threads"}).close()


def test_a_resumed_run_keeps_its_settings_but_for_those_that_may_change(tmp_path: Path) -> None:
    record(tmp_path, resume=False)
    record(tmp_path, resume=True, threads=2)
    with pytest.raises(
        ValueError, match=r"seed: expected 0, got 1; noise_steps: expected \[4\], got \[0\].*another --out"
    ):
        record(tmp_path, resume=True, seed=1, noise_steps=(0,))


def test_a_setting_the_first_start_did_not_know_is_a_change(tmp_path: Path) -> None:
    record(tmp_path, resume=False)
    with pytest.raises(ValueError, match="noise_modes: expected None, got 2"):
        record(tmp_path, resume=True, noise_modes=2)


def test_a_resume_without_a_first_start_is_a_first_start(tmp_path: Path) -> None:
    record(tmp_path / "new", resume=True)
    assert (tmp_path / "new" / "config.json").exists()
