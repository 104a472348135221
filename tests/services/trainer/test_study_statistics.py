"""Figures of a study on outcomes written by hand: gains, arms, effects, and the frozen criterion clause by clause."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.trainer.statistics import Interval
from services.trainer.study_record import FinishedRun, frozen_problems, results_of
from services.trainer.study_statistics import (
    RunGain,
    arm_figures,
    check_criterion,
    factorial_effects,
    mean_interval,
    run_gains,
    verdict,
)
from tests.services.trainer.study_results import write_frozen, write_run

LEVELS = {
    "original": {"a": False, "b": False}, "a": {"a": True, "b": False}, "b": {"a": False, "b": True},
    "corrected": {"a": True, "b": True},
}  # fmt: skip


def gain(arm: str, seed: int, value: float, low: float = 1.0, excess_high: float | None = 0.05) -> RunGain:
    excess = None if excess_high is None else Interval(0.0, -0.05, excess_high, 20, 0.9)
    own = Interval(value, low, value + 5, 20, 0.9)
    return RunGain(f"{arm}-{seed}", arm, "mended", seed, own, 0.7, None, excess, None, 10.0)


def test_a_gain_is_paired_by_state_in_percentage_points(tmp_path: Path) -> None:
    write_run(tmp_path, "sft", 0, 10)
    write_run(tmp_path, "corrected", 0, 13, excess_high=0.08)
    [found] = run_gains(results_of(tmp_path), 0.9)
    assert found.gain.value == pytest.approx(15)
    assert 0 < found.gain.low < 15 < found.gain.high < 35
    assert found.gain.count == 20
    assert found.success == pytest.approx(0.65)
    assert found.mismatch_replayed == 305  # the fewer of policy and baseline
    assert found.mismatch_excess is not None
    assert found.mismatch_excess.high == 0.08
    assert found.cpu_minutes == pytest.approx(10)  # wall time is none


def test_without_the_reference_there_is_no_gain(tmp_path: Path) -> None:
    write_run(tmp_path, "corrected", 0, 13)
    assert run_gains(results_of(tmp_path), 0.9) == []


def test_the_studys_own_numbers_give_its_mean_and_its_spread() -> None:
    published = {"corrected": [11.6, 11.1, 7.4, 14.4, 3.9], "original": [17.4, 4.6, 13.0, 10.4, -19.0]}
    gains = [gain(arm, seed, value) for arm, values in published.items() for seed, value in enumerate(values)]
    found = {arm.arm: arm for arm in arm_figures(gains, 0.9)}
    means = {name: arm.mean_pp.value for name, arm in found.items() if arm.mean_pp}
    assert means == pytest.approx({"corrected": 9.68, "original": 5.28})
    assert found["corrected"].sd_pp == pytest.approx(4.08, abs=0.01)
    assert found["original"].sd_pp == pytest.approx(14.34, abs=0.01)
    assert (found["corrected"].above_zero, found["original"].above_zero) == (5, 4)


def test_a_mean_over_seeds_has_students_interval() -> None:
    found = mean_interval([1.0, 2.0, 3.0], 0.9)  # mean 2, SD 1, t(0.95, 2) = 2.91999
    assert (found.value, found.high) == pytest.approx((2.0, 2.0 + 2.91999 / 3**0.5), abs=1e-4)
    assert found.count == 3


def test_main_effects_and_the_interaction_of_a_factorial() -> None:
    cells = {"original": 0.0, "a": 4.0, "b": 1.0, "corrected": 9.0}
    gains = [gain(arm, seed, value + (-1, 1)[seed]) for arm, value in cells.items() for seed in (0, 1)]
    effects = factorial_effects(LEVELS, gains, "mended", 0.9)
    values = {name: effect.value for name, effect in effects.items() if effect is not None}
    assert values == pytest.approx({"a": 6.0, "b": 3.0, "a x b": 2.0})
    # Each cell: variance 2, n 2. Var(effect) = 4 * 2 / (4 * 2) = 1, with 4 degrees of freedom: t(0.95, 4) = 2.13185.
    effect = effects["a"]
    assert effect is not None
    assert effect.high - effect.value == pytest.approx(2.13185, abs=1e-4)


def test_effects_need_two_seeds_of_every_arm() -> None:
    gains = [gain(arm, seed, 1.0) for arm in LEVELS for seed in (0, 1)][:-1]
    assert set(factorial_effects(LEVELS, gains, "mended", 0.9).values()) == {None}


def test_an_effects_interval_covers_the_truth_as_often_as_it_says() -> None:
    generator, covered, trials = np.random.default_rng(0), 0, 400
    spreads = {"original": 14.0, "a": 7.0, "b": 7.0, "corrected": 4.0}
    for _ in range(trials):
        gains = [
            gain(arm, s, 5.0 * LEVELS[arm]["a"] + generator.normal(0, spreads[arm])) for arm in LEVELS for s in range(5)
        ]
        effect = factorial_effects(LEVELS, gains, "mended", 0.9)["a"]
        assert effect is not None
        covered += effect.low <= 5.0 <= effect.high
    assert 0.86 <= covered / trials <= 0.94


MET = [gain("corrected", seed, 10.0 + seed) for seed in (0, 1)]


@pytest.mark.parametrize(
    ("gains", "met", "whole"),
    [
        (MET, [True, True, True, True], True),
        (MET[:1], [None, None, None, None], None),  # a seed is missing
        ([], [None, None, None, None], None),
        ([gain("corrected", 0, -1.0, low=-4.0)], [False, False, None, None], False),  # broken, whatever comes
        (
            [MET[0], gain("corrected", 1, 11.0, low=0.0)],
            [True, False, True, True],
            False,
        ),  # a bound of 0 is not above 0
        ([MET[0], gain("corrected", 1, 20.0)], [True, True, False, True], False),  # SD 7.07
        ([MET[0], gain("corrected", 1, 11.0, excess_high=0.1)], [True, True, True, False], False),
        ([MET[0], gain("corrected", 1, 11.0, excess_high=None)], [True, True, True, None], None),
        ([*MET, gain("original", 0, -50.0, low=-60.0)], [True, True, True, True], True),  # another arm's
    ],
)
def test_the_criterion_clause_by_clause(
    tmp_path: Path, gains: list[RunGain], met: list[bool | None], whole: bool | None
) -> None:
    frozen = write_frozen(tmp_path, {"original": (False, False), "corrected": (True, True)})
    checks = check_criterion(frozen, gains)
    assert [check.met for check in checks] == met
    assert verdict(checks) is whole


def test_a_frozen_file_and_its_runs_agree(tmp_path: Path) -> None:
    frozen = write_frozen(tmp_path, {"corrected": (True, True)})
    write_run(tmp_path, "sft", 0, 10)
    write_run(tmp_path, "corrected", 0, 13)
    assert frozen_problems(frozen, results_of(tmp_path)) == []


@pytest.mark.parametrize(
    ("frozen", "facts", "said"),
    [
        ({"criterion": {"arm": "corrected", "sd_below_pp": 70.0}}, {}, "not what its SHA-256 was taken of"),
        ({}, {"date": "2026-11-29"}, "before the criterion was frozen"),
        ({}, {"seed": 7}, "seed 7 is not among the frozen ones"),
        ({}, {"arm": "better"}, "knows no arm better"),
        ({}, {"depends": {"evaluation": {}, "settings": {}, "command": "ppo"}}, "evaluated otherwise"),
    ],
)
def test_what_does_not_agree_with_the_frozen_file_is_said(
    tmp_path: Path, frozen: dict[str, object], facts: dict[str, object], said: str
) -> None:
    stored = write_frozen(tmp_path, {"corrected": (True, True)}) | frozen
    write_run(tmp_path, "corrected", 0, 13, facts=facts)
    runs: dict[str, FinishedRun] = results_of(tmp_path)
    assert any(said in problem for problem in frozen_problems(stored, runs))
