"""Which of a study's figures are written down: those of arms whose frozen seeds are all done."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.study_figures import record_figures, study_figures
from services.trainer.study_record import results_of
from services.trainer.study_statistics import run_gains
from tests.services.trainer.study_results import write_frozen, write_run
from worldserve.results import load

ARMS = {"original": (False, False), "a": (True, False), "b": (False, True), "corrected": (True, True)}


def test_whole_arms_and_their_effects_are_recorded(tmp_path: Path) -> None:
    frozen = write_frozen(tmp_path, ARMS) | {"file": "studies/hand.yaml"}
    write_run(tmp_path, "sft", 0, 10)
    for seed in (0, 1):
        for successes, arm in enumerate(ARMS):
            write_run(tmp_path, arm, seed, 11 + 2 * successes + seed, excess_high=0.08 + 0.01 * seed)
    keys = record_figures(frozen, run_gains(results_of(tmp_path), 0.9), "study", tmp_path / "summary.json")
    found = load(tmp_path / "summary.json")
    assert set(keys) == set(found)
    assert found["study.corrected.mean_pp"].value == pytest.approx(37.5)
    assert found["study.corrected.mean_pp"].n == 2
    assert found["study.corrected.sd_pp"].value == pytest.approx(3.5355, abs=1e-3)
    assert found["study.corrected.seeds_above_zero"].value == 2
    assert found["study.original.min_low_pp"].value == pytest.approx(0.0)
    assert found["study.effect.a"].value == pytest.approx(10.0)  # 13, 17 against 11, 15 of 20 states
    assert found["study.effect.a_x_b"].value == pytest.approx(0.0)
    assert found["mismatch.corrected.excess_high"].value == pytest.approx(0.09)
    assert found["study.corrected.mean_pp"].command == "worldserve study studies/hand.yaml --record study"


def test_an_arm_that_misses_a_seed_is_not_and_neither_is_an_effect(tmp_path: Path) -> None:
    frozen = write_frozen(tmp_path, ARMS, seeds=(0, 1, 2))
    write_run(tmp_path, "sft", 0, 10)
    for seed in (0, 1, 2):
        write_run(tmp_path, "corrected", seed, 13 + seed)
    write_run(tmp_path, "original", 0, 10)
    found = study_figures(frozen, run_gains(results_of(tmp_path), 0.9), "study")
    assert {key.split(".")[1] for key in found} == {"corrected"}
    assert "mismatch.corrected.excess_high" not in found  # not measured
