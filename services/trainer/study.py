"""Seeds x recipes x world models, each run trained, evaluated and paired with its start: `worldserve study`.

    worldserve study studies/mini.yaml --plan               # what would be run, and what is done
    worldserve study studies/mini.yaml                      # one run after another
    worldserve study studies/mini.yaml --at-once 2 --only original corrected
    worldserve study studies/mini.yaml --executor ray --at-once 2                     # a Ray of this machine
    worldserve study studies/mini.yaml --executor ray --ray-address auto --at-once 8  # a cluster's
    worldserve study studies/mini.yaml --record study       # the figures to results/summary.json
    worldserve report results/study/mini                    # the page

The file is described in `services/trainer/study_file.py`; studies/mini.yaml is one to begin with. The first call
freezes the criterion, the seeds and the arms' settings in RESULTS/NAME/frozen.json, and later calls refuse to change
them. A run that is finished leaves one small file there, which belongs into version control: the same command goes on
where an earlier one was stopped or killed, and in a fresh clone knows what is done. Heavy files stay in OUT/NAME.
"""

from __future__ import annotations

import datetime
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from services.trainer.calls import resumable
from services.trainer.directories import claim
from services.trainer.study_executors import Outcome, run_locally, run_on_ray
from services.trainer.study_figures import record_figures
from services.trainer.study_file import Study, load_study
from services.trainer.study_plan import MODULE, Run, check_same_run, plan_runs
from services.trainer.study_record import REFERENCE, FinishedRun, criterion_sha256, freeze, read_run, results_of
from services.trainer.study_statistics import arm_figures, check_criterion, factorial_effects, run_gains, verdict
from worldserve.files import replace_text
from worldserve.results import current_commit

SUMMARY = "Seeds x recipes x world models, evaluated in pairs, with a criterion that was frozen beforehand."


@dataclass(frozen=True)
class StudyConfig:
    """Settings of how a study is carried out; what it is stands in its file."""

    study: tyro.conf.Positional[Path]
    """The study's YAML file."""
    plan: bool = False
    """Only show the runs, and which are done."""
    only: tuple[str, ...] = ()
    """Only these arms (none: all)."""
    at_once: int = 1
    """Runs at a time. Each has its own servers and about two busy processes."""
    executor: Literal["local", "ray"] = "local"
    """Processes of this machine, or Ray (the Python package ray)."""
    ray_address: str = ""
    """Of a cluster, for example "auto" or ray://HOST:10001; none starts a Ray on this machine."""
    cpus_per_run: float = 1.0
    """What a run asks of Ray."""
    out: Path = Path("runs/study")
    """Where checkpoints, logs and everything heavy go, in a directory of the study's name."""
    results: Path = Path("results/study")
    """Where the small files of finished runs go, in a directory of the study's name."""
    threads: int = 1
    """CPU threads of torch in each command."""
    record: str = ""
    """Also write the figures of what is done to results/summary.json, under keys that begin with this word."""

    def __post_init__(self) -> None:
        if min(self.at_once, self.threads) < 1 or not self.cpus_per_run > 0:
            raise ValueError(
                "at_once, threads, cpus_per_run: expected at least 1, 1 and more than 0; "
                f"got {self.at_once}, {self.threads}, {self.cpus_per_run}"
            )


def run(config: StudyConfig, module: str = MODULE) -> int:
    """Carries out what is not done; returns the exit status, 1 where a run failed.

    Args:
        module: what `python -m` runs in place of worldserve.cli; for tests.
    """
    from rich.console import Console

    console = Console(stderr=True)
    study = load_study(config.study)
    unknown = sorted(set(config.only) - {arm.name for arm in study.arms})
    if unknown:
        raise ValueError(f"only: expected arms of {config.study}; got {', '.join(unknown)}")
    results, out = config.results / study.name, config.out / study.name
    runs = plan_runs(study, out, config.threads, module)
    finished = results_of(results) if results.is_dir() else {}
    for item in runs:
        if item.name in finished:
            check_same_run(item, finished[item.name])
    wanted = [item for item in runs if not config.only or item.arm in (*config.only, REFERENCE)]
    todo = [item for item in wanted if item.name not in finished]
    console.print(f"{study.name}: {len(wanted)} runs, {len(wanted) - len(todo)} done")
    if config.plan:
        for item in wanted:
            print(f"{'done' if item.name in finished else 'to do':>6}  {item.name}")
        return 0
    with claim(out, f"out: another process carries out the study in {out}; wait for it"):
        about = {"study": study.name, "file": str(study.path), "file_sha256": study.sha256, "date": _today()}
        about |= {"commit": _commit(), "criterion_sha256": criterion_sha256(study.frozen())}
        frozen = freeze(results, study.frozen(), about)
        failed = carry_out(config, todo, results, _about(study), console)
    runs_done = results_of(results)
    show(frozen, runs_done, console)
    if config.record:
        keys = record_figures(frozen, run_gains(runs_done, study.evaluation.confidence), config.record)
        console.print(f"recorded {len(keys)} figures; `worldserve results render` writes them down", markup=False)
    for name, why in failed.items():
        console.print(f"failed: {name}: {why}", markup=False, highlight=False)
    if failed:
        console.print(f"{len(failed)} runs failed; the same command tries them again", style="bold")
    return int(bool(failed))


def carry_out(
    config: StudyConfig, todo: Sequence[Run], results: Path, about: Mapping[str, Any], console: Any
) -> dict[str, str]:
    """Runs what is to do, the reference before all others; returns why runs failed, by name."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    failed: dict[str, str] = {}
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    first = [item for item in todo if item.name == REFERENCE]
    rest = [item for item in todo if item.name != REFERENCE]
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("runs", total=len(todo))
        for part in (first, rest):
            if failed or not part:
                continue  # nothing can be paired without the reference
            specs = [{**item.spec, "depends": item.depends, "about": about} for item in part]
            with closing(_execute(config, specs)) as outcomes:
                for name, text, why in outcomes:
                    if text is None:
                        failed[name] = why
                    else:
                        keep(results, name, text)
                        bars.console.print(_line(results, name), markup=False, highlight=False)
                    bars.advance(task)
    return failed


def keep(results: Path, name: str, text: str) -> FinishedRun:
    """Writes a finished run's file whole, once it reads as one."""
    path = results / f"{name}.jsonl"
    replace_text(path.with_name(f".{name}.jsonl.new"), text)
    try:
        found = read_run(path.with_name(f".{name}.jsonl.new"))
    finally:
        path.with_name(f".{name}.jsonl.new").unlink()
    replace_text(path, text)
    return found


def _execute(config: StudyConfig, specs: Sequence[Mapping[str, Any]]) -> Generator[Outcome]:
    if config.executor == "ray":
        return run_on_ray(specs, config.at_once, config.ray_address, config.cpus_per_run)
    return run_locally(specs, config.at_once)


def _line(results: Path, name: str) -> str:
    """One line about a run that has just ended."""
    runs = {found: read_run(results / f"{found}.jsonl") for found in {REFERENCE, name}}
    for gain in run_gains(runs, 0.9):
        value = gain.gain
        return (
            f"{name}: {value.value:+.1f} pp [{value.low:+.1f}, {value.high:+.1f}], success {gain.success:.3f}, "
            f"{gain.cpu_minutes:.1f} CPU-minutes"
        )
    return f"{name}: done"


def show(frozen: Mapping[str, Any], runs: Mapping[str, FinishedRun], console: Any) -> None:
    """Arms, effects and criterion, as far as there are runs."""
    from rich.table import Table

    confidence = float(frozen["evaluation"]["confidence"])
    gains = run_gains(runs, confidence)
    if not gains:
        return
    table = Table("arm", "world model", "seeds", "mean", "interval", "SD", "least low", "CPU-min a run")
    for arm in arm_figures(gains, confidence):
        mean = arm.mean_pp
        interval = f"[{mean.low:+.1f}, {mean.high:+.1f}]" if mean else ""
        table.add_row(
            arm.arm, arm.world_model, str(len(arm.seeds)), f"{mean.value:+.1f}" if mean else "", interval,
            f"{arm.sd_pp:.1f}" if arm.sd_pp is not None else "", f"{arm.min_low_pp:+.1f}", f"{arm.cpu_minutes:.1f}",
        )  # fmt: skip
    console.print(table)
    levels = {name: arm["levels"] for name, arm in frozen["arms"].items() if arm["levels"]}
    for world_model in sorted({gain.world_model for gain in gains if gain.arm in levels}):
        for effect, interval_of in factorial_effects(levels, gains, world_model, confidence).items():
            said = (
                f"{interval_of.value:+.1f} pp [{interval_of.low:+.1f}, {interval_of.high:+.1f}]"
                if interval_of
                else "needs two seeds of each arm"
            )
            console.print(f"effect of {effect} in {world_model}: {said}", markup=False, highlight=False)
    checks = check_criterion(frozen, gains)
    for check in checks:
        met = {True: "met", False: "NOT met", None: "open"}[check.met]
        console.print(f"{met:>8}: {check.clause} ({check.found})", markup=False, highlight=False)
    if checks:
        word = {True: "met", False: "NOT met", None: "open"}[verdict(checks)]
        console.print(f"criterion {frozen['criterion_sha256'][:12]} of {frozen['criterion']['arm']}: {word}")


def _about(study: Study) -> dict[str, str]:
    return {"commit": _commit(), "date": _today(), "study_sha256": study.sha256}


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _commit() -> str:
    try:
        return current_commit()
    except ValueError:
        return ""


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve study`: exit status 0 done, 1 where runs failed, 130 interrupted; nothing outlives it."""
    config = tyro.cli(StudyConfig, args=argv, prog="worldserve study", description=__doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return resumable("study", lambda: run(config))


if __name__ == "__main__":
    sys.exit(main())
