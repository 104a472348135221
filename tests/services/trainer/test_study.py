"""A study: its file, its runs as real processes, a kill in the middle, and what a fresh clone knows."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.trainer import study as study_command
from services.trainer.study import StudyConfig
from services.trainer.study_file import load_study
from services.trainer.study_plan import plan_runs
from services.trainer.study_record import read_run, results_of
from services.trainer.study_statistics import arm_figures, check_criterion, factorial_effects, run_gains, verdict
from worldserve.supervise import process_start_ticks

ROOT = Path(__file__).parents[3]
STUB = "tests.services.trainer.study_stub"
STUDY = """
name: tiny
seeds: [0, 1]
policy: start
initial_states: states
reward: {target: "127.0.0.1:3"}
simulator: {target: "127.0.0.1:1"}
world_models:
  mended: {target: "127.0.0.1:2"}
evaluation: {seeds: [0, 1]}
mismatch: {arms: [corrected], successes: 300}
criterion: {arm: corrected, gain_above_pp: 0, low_above_pp: 0, sd_below_pp: 8, mismatch_excess_high_below: 0.1}
factorial:
  none: original
  all: corrected
  settings: {iterations: 5}
  factors:
    termination: {original: {limit_as: truncated}, fixed: {limit_as: terminated}}
    value_lr: {original: {value_learning_rate: 1e-3}, fixed: {value_learning_rate: 1e-4}}
"""
DRIVER = """
import sys
from pathlib import Path
from services.trainer.study import StudyConfig, run
sys.exit(run(StudyConfig(Path(sys.argv[1]), at_once=2), "tests.services.trainer.study_stub"))
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a study, a starting policy that succeeds in half the states, and the stub's log."""
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "model.safetensors").write_text("0.5")
    (tmp_path / "study.yaml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "stub.log"))
    return tmp_path


def configured(**changes: Any) -> StudyConfig:
    return StudyConfig(Path("study.yaml"), **changes)


def starts(work: Path, command: str) -> list[str]:
    """Notes of the stub's starts of one command."""
    log = work / "stub.log"
    return [line for line in log.read_text().splitlines() if line.split()[1] == command] if log.exists() else []


def wait_until(condition: Callable[[], bool]) -> bool:
    for _ in range(6000):
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_a_factorial_has_an_arm_for_every_combination_of_fixes(work: Path) -> None:
    study = load_study(Path("study.yaml"))
    found = {arm.name: (arm.settings["limit_as"], arm.settings["value_learning_rate"]) for arm in study.arms}
    assert found == {
        "original": ("truncated", 1e-3),
        "value_lr": ("truncated", 1e-4),
        "termination": ("terminated", 1e-3),
        "corrected": ("terminated", 1e-4),
    }
    assert study.arm("termination").levels == {"termination": True, "value_lr": False}
    names = [run.name for run in plan_runs(study, Path("runs"))]
    assert names[:2] == ["sft", "original--mended--seed-0"]  # what all are paired with comes first
    assert len(names) == 1 + 4 * 2


@pytest.mark.parametrize("path", sorted((ROOT / "studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_study_is_one(path: Path) -> None:
    study = load_study(path)
    assert study.name == path.stem
    assert len(plan_runs(study, Path("runs"))) > 1


def test_the_shipped_study_is_a_two_to_the_third_factorial_over_five_seeds() -> None:
    study = load_study(ROOT / "studies" / "mini.yaml")
    assert study.seeds == (0, 1, 2, 3, 4)
    assert study.factors == ("termination", "critic", "value_lr")
    assert len(study.arms) == 8
    assert {"original", "corrected"} <= {arm.name for arm in study.arms}
    assert study.criterion is not None
    assert (study.criterion.gain_above_pp, study.criterion.low_above_pp, study.criterion.sd_below_pp) == (0, 0, 7)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seeds: [0, 1]", "seeds: [0, 0]", "seeds: expected distinct whole numbers"),
        ("name: tiny", "title: tiny", "expected keys of name, seeds"),
        ("iterations: 5", "iterations: five", r"factorial \(original\): settings: iterations: expected a whole number"),
        ("iterations: 5", "speed: 5", "expected a mapping from settings of PPOConfig; got"),
        ("iterations: 5", "out: runs/x", "out: the study sets these itself"),
        ("iterations: 5", "iterations: 3", "critic_warmup_iterations: expected 0 to"),
        ("arm: corrected,", "arm: correct,", "expected arms among original"),
        ("{limit_as: truncated}", "{iterations: 6}", "factorial.factors.termination.iterations: expected in one"),
        ("name: tiny", "name: tiny\nname: again", "expected every key once"),
        ('{target: "127.0.0.1:2"}', '{target: "127.0.0.1:2", weights: w}', "expected either target, or weights"),
        ("sd_below_pp: 8", "sd_below: 8", "criterion: expected a mapping from settings of Criterion; got"),
    ],
)
def test_what_a_study_file_may_not_say(work: Path, old: str, new: str, said: str) -> None:
    assert old in STUDY
    Path("study.yaml").write_text(STUDY.replace(old, new))
    with pytest.raises(ValueError, match=said) as caught:
        load_study(Path("study.yaml"))
    assert str(caught.value).startswith("study study.yaml: ")


def test_every_run_leaves_one_small_file_from_which_all_figures_are_made(work: Path) -> None:
    assert study_command.run(configured(at_once=2), STUB) == 0
    runs = results_of(Path("results/study/tiny"))
    assert len(runs) == 9
    gains = run_gains(runs, 0.9)
    found = {(gain.arm, gain.seed): round(gain.gain.value) for gain in gains}
    assert found == {
        ("original", 0): 0, ("original", 1): 10, ("value_lr", 0): 10, ("value_lr", 1): 20,
        ("termination", 0): 20, ("termination", 1): 30, ("corrected", 0): 30, ("corrected", 1): 40,
    }  # fmt: skip
    corrected = next(arm for arm in arm_figures(gains, 0.9) if arm.arm == "corrected")
    assert corrected.mean_pp is not None
    assert corrected.mean_pp.value == pytest.approx(35)
    assert corrected.sd_pp == pytest.approx(7.0710678)
    assert corrected.above_zero == 2
    frozen = json.loads(Path("results/study/tiny/frozen.json").read_text())
    levels = {name: arm["levels"] for name, arm in frozen["arms"].items()}
    effects = factorial_effects(levels, gains, "mended", 0.9)
    values = {name: round(effect.value, 6) for name, effect in effects.items() if effect is not None}
    assert values == {"termination": 20, "value_lr": 10, "termination x value_lr": 0}
    checks = check_criterion(frozen, gains)
    assert [check.met for check in checks] == [True] * 4
    assert verdict(checks) is True
    measured = runs["corrected--mended--seed-0"]
    assert [row["iteration"] for row in measured.metrics] == [0, 1, 2, 3, 4]
    assert measured.facts["mismatch"]["excess"]["high"] == 0.05
    assert runs["original--mended--seed-0"].facts["mismatch"] is None
    assert measured.facts["cpu_s"]["train"]["commands"] > 0


def test_a_kill_leaves_nothing_behind_and_the_same_study_goes_on(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_SLEEP_S", "2")
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, "study.yaml"], stderr=subprocess.DEVNULL)
    train = Path("runs/study/tiny/value_lr--mended--seed-0/train/metrics.jsonl")
    assert wait_until(lambda: train.exists() and Path("results/study/tiny/sft.jsonl").exists())
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    pids = [int(line.split()[0]) for line in (work / "stub.log").read_text().splitlines()]
    pids += [int(line.split()[2]) for line in starts(work, "worker")]
    assert wait_until(lambda: not any(process_start_ticks(pid) is not None for pid in pids))
    before = train.read_text()
    assert 0 < len(before.splitlines()) < 5, "it was killed in the middle"
    monkeypatch.setenv("STUB_SLEEP_S", "0")
    assert study_command.run(configured(at_once=2), STUB) == 0
    assert train.read_text().startswith(before)
    assert "resumed at iteration" in (train.parents[1] / "logs" / "train.log").read_text()
    assert len(results_of(Path("results/study/tiny"))) == 9
    assert sum("sft" in line for line in starts(work, "evaluate")) == 1  # the reference was done, and stays so


def test_a_fresh_clone_reads_the_results_and_runs_nothing_again(work: Path) -> None:
    study_command.run(configured(only=("original",)), STUB)
    shutil.rmtree("runs")
    count = len(starts(work, "ppo"))
    assert count == 2
    assert study_command.run(configured(only=("original",)), STUB) == 0
    assert len(starts(work, "ppo")) == count
    assert study_command.run(configured(only=("original", "value_lr")), STUB) == 0
    assert len(starts(work, "ppo")) == count + 2


def test_a_plan_runs_and_freezes_nothing(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study_command.run(configured(plan=True), STUB) == 0
    assert capsys.readouterr().out.count(" to do ") == 9
    assert not Path("results").exists()
    assert not (work / "stub.log").exists()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("sd_below_pp: 8", "sd_below_pp: 9", r"criterion\.sd_below_pp: expected 8\.?0?; got 9"),
        ("seeds: [0, 1]\npolicy", "seeds: [0, 1, 2]\npolicy", r"seeds: expected \[0, 1\]; got \[0, 1, 2\]"),
        ("evaluation: {seeds: [0, 1]}", "evaluation: {seeds: [0]}", "evaluation.seeds: expected"),
        ("value_learning_rate: 1e-4", "value_learning_rate: 2e-4", "value_learning_rate: expected 0.0001; got 0.0002"),
    ],
)
def test_what_was_frozen_may_not_change(work: Path, old: str, new: str, said: str) -> None:
    study_command.run(configured(only=("original",)), STUB)
    assert old in STUDY
    Path("study.yaml").write_text(STUDY.replace(old, new))
    with pytest.raises(ValueError, match=said):
        study_command.run(configured(), STUB)


def test_arms_may_be_added_later(work: Path) -> None:
    study_command.run(configured(only=("original",)), STUB)
    Path("study.yaml").write_text(STUDY + "arms: [{name: more, settings: {iterations: 7}, seeds: [3]}]\n")
    assert study_command.run(configured(only=("more",)), STUB) == 0
    assert "more--mended--seed-3" in results_of(Path("results/study/tiny"))
    assert "more" in json.loads(Path("results/study/tiny/frozen.json").read_text())["arms"]


def test_a_finished_run_of_another_start_is_not_taken_for_this_one(work: Path) -> None:
    study_command.run(configured(only=("original",)), STUB)
    (work / "start" / "model.safetensors").write_text("0.6")
    with pytest.raises(ValueError, match="policy_sha256: expected"):
        study_command.run(configured(only=("original",)), STUB)


def test_what_lies_in_a_runs_directory_is_not_taken_for_a_run_of_other_settings(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study_command.run(configured(only=("original",)), STUB)
    shutil.rmtree("results")  # as if nobody had committed them
    Path("study.yaml").write_text(STUDY.replace("limit_as: truncated", "limit_as: contract"))
    assert study_command.run(configured(only=("original",)), STUB) == 1
    assert "original--mended--seed-0 holds a run with other settings" in capsys.readouterr().err.replace("\n", "")


def test_a_mismatch_that_is_asked_for_later_is_measured_without_training_again(work: Path) -> None:
    study_command.run(configured(only=("original",)), STUB)
    for path in Path("results/study/tiny").glob("original*"):
        path.unlink()
    Path("study.yaml").write_text(STUDY.replace("arms: [corrected], succ", "arms: [original], succ"))
    assert study_command.run(configured(only=("original",)), STUB) == 0
    assert results_of(Path("results/study/tiny"))["original--mended--seed-0"].facts["mismatch"] is not None
    assert len(starts(work, "ppo")) == 2


def test_evaluations_in_two_simulators_are_not_paired(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study_command.run(configured(only=("original",)), STUB)
    monkeypatch.setenv("STUB_SIMULATOR", "b")
    with pytest.raises(ValueError, match="cannot be paired with that of sft"):
        study_command.run(configured(only=("value_lr",)), STUB)


def test_a_run_that_fails_is_named_and_the_others_go_on(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUB_FAILS", "mismatch")
    assert study_command.run(configured(), STUB) == 1
    said = capsys.readouterr().err
    assert "failed: corrected--mended--seed-0" in said
    assert "it was told to fail" in said
    assert len(results_of(Path("results/study/tiny"))) == 7
    monkeypatch.delenv("STUB_FAILS")
    count = len(starts(work, "ppo"))
    assert study_command.run(configured(), STUB) == 0
    assert len(starts(work, "ppo")) == count  # what was trained is not trained again


def test_nothing_is_run_while_the_reference_fails(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_FAILS", "evaluate")
    assert study_command.run(configured(), STUB) == 1
    assert starts(work, "ppo") == []


def test_servers_that_a_run_serves_for_itself_are_gone_with_it(work: Path) -> None:
    served = STUDY.replace('{target: "127.0.0.1:3"}', "{weights: start}").replace(
        '{target: "127.0.0.1:2"}', "{weights: start, settings: {sampler_steps: 2}}"
    )
    Path("study.yaml").write_text(served)
    assert study_command.run(configured(only=("original",)), STUB) == 0
    [first, *_] = starts(work, "serve-wm")
    assert first.split()[2:] == [
        "--reward", "127.0.0.1:1", "--initial-states", "states", "--weights", "start", "--sampler-steps", "2",
    ]  # fmt: skip
    pids = [int(line.split()[0]) for command in ("serve-wm", "serve-reward") for line in starts(work, command)]
    assert len(pids) == 4  # two runs; the reference needs neither
    assert wait_until(lambda: not any(process_start_ticks(pid) is not None for pid in pids))


def test_ray_carries_out_the_same_runs(work: Path) -> None:
    pytest.importorskip("ray", reason="the Python package ray is not installed (pip install ray)")
    config = dataclasses.replace(configured(only=("original",)), executor="ray", at_once=2)
    assert study_command.run(config, STUB) == 0
    runs = results_of(Path("results/study/tiny"))
    assert sorted(runs) == ["original--mended--seed-0", "original--mended--seed-1", "sft"]
    assert read_run(Path("results/study/tiny/sft.jsonl")).success["test/0000"] == (1, 1)
    assert os.environ.get("RAY_ADDRESS") is None
