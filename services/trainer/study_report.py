"""The page about a study: `worldserve report results/study/NAME`.

Everything on it is made of the frozen file and the runs' files; the criterion is the frozen one, and is checked here.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.trainer.json_files import read_json
from services.trainer.report import page
from services.trainer.statistics import Interval
from services.trainer.study_plots import effects_plot, gains_plot, seed_curves
from services.trainer.study_published import PUBLISHED, PUBLISHED_FORKS, PublishedArm
from services.trainer.study_record import FROZEN, REFERENCE, FinishedRun, frozen_problems, results_of
from services.trainer.study_statistics import (
    ArmFigures,
    Check,
    RunGain,
    arm_figures,
    check_criterion,
    factorial_effects,
    run_gains,
    success_rate,
    verdict,
)
from worldserve.files import replace_text

_CURVES = {
    "env/verdict": "success of training episodes, by verdict",
    "env/success": "success of training episodes, by the simulator",
    "critic/explained_variance": "critic: explained variance",
}
_WORDS = {True: "met", False: "not met", None: "open"}


@dataclass(frozen=True)
class StudyFiles:
    """A study as its directories give it back."""

    frozen: Mapping[str, Any]
    runs: Mapping[str, FinishedRun]
    gains: Sequence[RunGain]
    forks: Sequence[Mapping[str, Any]]
    videos: Sequence[tuple[Path, str]]

    @property
    def confidence(self) -> float:
        """Of all intervals."""
        return float(self.frozen["evaluation"]["confidence"])


def load_study_files(results: Path, runs: Path, forks: Sequence[Path] = (), videos: Sequence[Path] = ()) -> StudyFiles:
    """Reads what there is of a study.

    Args:
        results: results/study/NAME.
        runs: where the studies' heavy files lie; their exploits are shown where there are some.
        forks: directories of `worldserve forks`.
        videos: directories of videos with an index videos.json.

    Raises:
        FileNotFoundError, ValueError: for a directory that does not hold what it should.
    """
    frozen = read_json(results / FROZEN)
    found = results_of(results)
    gains = run_gains(found, float(frozen["evaluation"]["confidence"]))
    listed = [*videos, *sorted((runs / str(frozen["study"])).glob("*/exploits"))]
    return StudyFiles(
        frozen, found, gains, [read_json(path / "result.json") for path in forks],
        [video for directory in listed for video in _indexed(directory)],
    )  # fmt: skip


def write_study_report(
    results: Path, runs: Path, out: Path | None = None, forks: Sequence[Path] = (), videos: Sequence[Path] = ()
) -> Path:
    """Writes the page, atomically; returns where."""
    study = load_study_files(results, runs, forks, videos)
    out = out or runs / str(study.frozen["study"]) / "report.html"
    replace_text(out, render_study(study))
    return out


def render_study(study: StudyFiles) -> str:
    """The page."""
    arms = arm_figures(study.gains, study.confidence)
    sections = [
        _headline(study, arms), _criterion(study), _published(study, arms), _arms(study, arms), _effects(study),
        _runs(study), _curves(study), _forks(study), _videos(study), _settings(study),
    ]  # fmt: skip
    return page(f"Study {study.frozen['study']}", sections)


# Sections --------------------------------------------------------------------------------------------------------


def _headline(study: StudyFiles, arms: Sequence[ArmFigures]) -> str:
    wanted = sum(len(arm["seeds"]) * max(1, len(arm["world_models"])) for arm in study.frozen["arms"].values())
    reference = study.runs.get(REFERENCE)
    figures = [("runs", str(len(study.gains)), f"of {wanted}")]
    if reference is not None:
        figures.append(("starting policy", f"{success_rate(reference):.1%}", f"{len(reference.success)} test states"))
    criterion = study.frozen.get("criterion")
    if criterion:
        checks = check_criterion(study.frozen, study.gains)
        figures.append(("criterion", _WORDS[verdict(checks)], criterion["arm"]))
        for arm in arms:
            if arm.arm == criterion["arm"] and arm.mean_pp is not None:
                name = f"{arm.arm} in {arm.world_model}" if arm.world_model else arm.arm
                figures.append((name, f"{arm.mean_pp.value:+.1f} points", f"SD {arm.sd_pp:.1f} over seeds"))
    boxes = "".join(
        f'<div class="figure">{html.escape(name)}<b>{html.escape(value)}</b>{html.escape(note)}</div>'
        for name, value, note in figures
    )
    note = (
        f"Success in the simulator on sealed test states, {len(study.frozen['evaluation']['seeds'])} episodes each, "
        "paired with the starting policy on the same states and noise. Gains are percentage points. Brackets are "
        f"{study.confidence:.0%} intervals: of one run by a bootstrap over states, of an arm or an effect by t over "
        "seeds."
    )
    return f'<div class="figures">{boxes}</div><p class="note">{html.escape(note)}</p>'


def _criterion(study: StudyFiles) -> str:
    frozen = study.frozen
    if not frozen.get("criterion"):
        return ""
    checks: list[Check] = check_criterion(frozen, study.gains)
    rows = [(check.clause, check.found, _WORDS[check.met]) for check in checks]
    problems = frozen_problems(frozen, study.runs)
    said = (
        f"Frozen on {frozen['date']} at commit {frozen['commit'] or 'unknown'}, SHA-256 "
        f"{frozen['criterion_sha256']}, for the arm {frozen['criterion']['arm']} and seeds "
        f"{', '.join(map(str, frozen['arms'][frozen['criterion']['arm']]['seeds']))}."
    )
    trouble = "".join(f"<li>{html.escape(problem)}</li>" for problem in problems)
    checked = f"<ul>{trouble}</ul>" if trouble else '<p class="note">The hash and every run agree with it.</p>'
    return (
        f"<h2>Criterion: {_WORDS[verdict(checks)]}</h2>{_table(('clause', 'found', ''), rows, text=(1, 2))}"
        f'<p class="note">{html.escape(said)}</p>{checked}'
    )


def _published(study: StudyFiles, arms: Sequence[ArmFigures]) -> str:
    """The study's table beside ours; ours are matched by the arm's name."""
    by_name = {arm.arm: arm for arm in reversed(arms)}  # the first world model of an arm
    rows = [_published_row(entry, by_name.get(entry.arm), study) for entry in PUBLISHED]
    others = [arm for arm in arms if arm.arm not in {entry.arm for entry in PUBLISHED}]
    if others:
        rows.append(("single fixes and other arms", "not published", "see below"))
    note = (
        "Published: RL inside World Models, October 2026: pi0.5, BWM and RoboTwin 2.0. Ours: the models of this study."
    )
    head = ("", "the study", "ours")
    return f'<h2>The study and ours</h2>{_table(head, rows, text=(1, 2))}<p class="note">{note}</p>'


def _published_row(entry: PublishedArm, arm: ArmFigures | None, study: StudyFiles) -> tuple[str, str, str]:
    ours = "not run"
    if arm is not None:
        own = [gain for gain in study.gains if gain.arm == arm.arm and gain.world_model == arm.world_model]
        gains = " ".join(f"{gain.gain.value:+.1f}" for gain in own)
        mean = f"; mean {_points(arm.mean_pp)}, SD {arm.sd_pp:.1f}" if arm.mean_pp is not None else ""
        ours = f"{gains}{mean}; lower bounds above 0: {arm.lows_above_zero} of {len(own)}"
        measured = [gain.mismatch for gain in own if gain.mismatch is not None]
        if measured:
            ours += "; mismatch " + " ".join(f"{interval.value:.2f}" for interval in measured)
    return entry.title, entry.published, ours


def _arms(study: StudyFiles, arms: Sequence[ArmFigures]) -> str:
    if not arms:
        return "<p>No trained run is finished yet.</p>"
    rows = []
    for arm in arms:
        sd = f"{arm.sd_pp:.1f}" if arm.sd_pp is not None else ""
        rows.append((
            arm.arm, arm.world_model or "simulator", str(len(arm.seeds)), _points(arm.mean_pp), sd,
            f"{arm.above_zero}", f"{arm.min_low_pp:+.1f}", f"{arm.cpu_minutes:.1f}",
        ))  # fmt: skip
    head = ("arm", "trained in", "seeds", "mean gain", "SD", "gains > 0", "least lower bound", "CPU-minutes a run")
    return f'<h2>Arms</h2>{_table(head, rows, text=(1,))}<div class="wide">{gains_plot(study.gains)}</div>'


def _effects(study: StudyFiles) -> str:
    levels = {name: arm["levels"] for name, arm in study.frozen["arms"].items() if arm["levels"]}
    parts = []
    for world_model in sorted({gain.world_model for gain in study.gains if gain.arm in levels}):
        effects = factorial_effects(levels, study.gains, world_model, study.confidence)
        rows = [
            (name, _points(effect) if effect else "needs two seeds of each arm") for name, effect in effects.items()
        ]
        known = {name: effect for name, effect in effects.items() if effect is not None}
        parts.append(f"<p>In {html.escape(world_model)}:</p>{_table(('effect', 'percentage points'), rows)}")
        parts.append(f'<div class="wide">{effects_plot(known)}</div>' if known else "")
    if not parts:
        return ""
    note = (
        "A main effect is the mean gain of the arms with the fix minus that of those without; an interaction is half "
        "the difference that one fix makes to the other's effect. The unit is the training seed; arms have their own "
        "variances (Welch, Satterthwaite)."
    )
    return f'<h2>What each fix is worth</h2>{"".join(parts)}<p class="note">{note}</p>'


def _runs(study: StudyFiles) -> str:
    rows = []
    for gain in study.gains:
        replayed = f" of {gain.mismatch_replayed}" if gain.mismatch_replayed is not None else ""
        rows.append((
            gain.run, f"{gain.success:.1%}", _points(gain.gain), _share(gain.mismatch) + replayed,
            _share(gain.mismatch_excess, "+"), f"{gain.cpu_minutes:.1f}",
        ))  # fmt: skip
    if not rows:
        return ""
    head = ("run", "success", "gain", "mismatch", "excess over the start", "CPU-minutes")
    note = (
        "Mismatch: share of the successes in the world model that fail when their actions run in the simulator; its "
        "excess is that over the starting policy's, on the same states and seeds."
    )
    return f'<h2>Runs</h2>{_table(head, rows)}<p class="note">{note}</p>'


def _curves(study: StudyFiles) -> str:
    plots = []
    for column, title in _CURVES.items():
        for arm in study.frozen["arms"]:
            rows = {
                f"{run.facts['world_model']} seed {run.facts['seed']}".strip(): run.metrics
                for run in study.runs.values()
                if run.facts["arm"] == arm
            }
            plots.append(seed_curves(rows, column, f"{arm}: {title}"))
    shown = "".join(plot for plot in plots if plot)
    return f'<h2>Learning curves</h2><div class="curves">{shown}</div>' if shown else ""


def _forks(study: StudyFiles) -> str:
    if not study.forks:
        return ""
    rows = []
    for result in study.forks:
        mixed, floor = result.get("mixed") or {}, result.get("floor") or {}
        flips = floor.get("flip_rate") or (floor.get("mixed") or {}).get("flip_rate")
        rows.append((
            f"{result.get('split', '')} states", _share(_read(mixed.get("fake_success"))),
            _share(_read(mixed.get("recall"))), _share(_read(flips)), _share(_read(mixed.get("above_floor")), "+"),
        ))  # fmt: skip
    head = ("", "failures drawn as successes", "recall", "the simulator's own flips", "above the floor")
    return (
        "<h2>Forks: starts from which the actions decide</h2>"
        f'{_table(head, rows)}<p class="note">The study: {html.escape(PUBLISHED_FORKS)}</p>'
    )


def _videos(study: StudyFiles) -> str:
    figures = []
    for path, caption in study.videos:
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        figures.append(
            '<figure><div class="sides note"><span>simulator</span><span>world model</span></div>'
            f'<video controls muted loop playsinline preload="metadata" src="data:video/mp4;base64,{data}"></video>'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    if not figures:
        return ""
    return (
        '<h2>Successes that are none</h2><p class="note">The same actions in the simulator (left) and in the world '
        f'model (right).</p><div class="videos">{"".join(figures)}</div>'
    )


def _settings(study: StudyFiles) -> str:
    parts = []
    for name, arm in study.frozen["arms"].items():
        rows = [(setting, str(value)) for setting, value in sorted(arm["settings"].items())]
        table = _table((f"worldserve {arm['command']}", ""), rows, text=(1,))
        parts.append(f"<details><summary>{html.escape(name)}</summary>{table}</details>")
    return f"<h2>Settings of the arms</h2>{''.join(parts)}"


# Pieces ----------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = ()) -> str:
    """A table; columns in `text` are aligned as text, the others as numbers but for the first."""
    kinds = ['class="text"' if number in text else "" for number in range(len(head))]
    top = "".join(f"<th {kind}>{html.escape(name)}</th>" for name, kind in zip(head, kinds))
    body = "".join(
        "<tr>" + "".join(f"<td {kind}>{html.escape(cell)}</td>" for cell, kind in zip(row, kinds)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _points(interval: Interval | None) -> str:
    return f"{interval.value:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]" if interval is not None else ""


def _share(interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return ""
    value, low, high = (format(getattr(interval, name), f"{sign}.2f") for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _read(found: Any) -> Interval | None:
    names = ("value", "low", "high", "count", "confidence")
    return Interval(**{name: found[name] for name in names}) if isinstance(found, Mapping) else None


def _indexed(directory: Path) -> list[tuple[Path, str]]:
    """Videos that an index names, with what can be said of each."""
    path = directory / "videos.json"
    if not path.is_file():
        return []
    found = []
    for entry in read_json(path):
        video = directory / str(entry["video"])
        if video.is_file():
            found.append((video, str(entry.get("caption") or _caption(entry))))
    return found


def _caption(entry: Mapping[str, Any]) -> str:
    """Of a disagreement of `worldserve fidelity`."""
    outcome = {True: "success", False: "failure"}
    truth, drawn = outcome[bool(entry.get("success"))], outcome[bool(entry.get("target_success"))]
    peak = entry.get("target_peak")
    read = f" (peak {peak:.3f})" if isinstance(peak, int | float) else ""
    return f"{entry.get('initial_state_id', '')}: {truth} in the simulator, read as {drawn} in the world model{read}"
