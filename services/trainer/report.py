"""One self-contained HTML page about a run or a study: `worldserve report`.

A run is what `worldserve demo` or `worldserve ppo` left, a study the results directory of `worldserve study`. The page
holds its figures, curves and videos itself, so that it can be sent as one file; it needs no network and reads on a
phone. What there is not yet is left out.

    worldserve report runs/demo
    worldserve report runs/ppo --out /tmp/report.html
    worldserve report results/study/mini                                   # a study
    worldserve report results/study/mini --forks runs/forks/train runs/forks/unseen --videos runs/fidelity/held-out/videos
"""  # noqa: E501

from __future__ import annotations

import base64
import html
import io
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from services.trainer.json_files import read_json, read_jsonl
from services.trainer.phases import WALL
from services.trainer.side_by_side import SideBySide, load_videos
from services.trainer.study_record import FROZEN
from worldserve.files import replace_text

SUMMARY = "Write one self-contained HTML page about a run or a study."
COLOURS = ("#1763a6", "#c2571a")
PHASES = ("start servers", "evaluate SFT", "PPO in the world model", "evaluate result", "videos")
# Title, and the columns of metrics.jsonl that it shows with their legend.
CURVES: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("Success of training episodes", {"env/verdict": "reward model", "env/success": "ground truth"}),
    ("Critic: explained variance", {"critic/explained_variance": ""}),
    ("Policy: approximate KL of an update", {"actor/approx_kl": ""}),
    ("Policy: share of clipped ratios", {"actor/clip_fraction": ""}),
)
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; max-width: 60rem; margin: 0 auto;
  padding: 1rem; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
.note { color: #57606a; font-size: 0.9rem; } .figures { display: grid; gap: 0.75rem;
  grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); }
.figure { border: 1px solid #d0d7de; border-radius: 0.5rem; padding: 0.75rem 1rem; }
.figure b { display: block; font-size: 1.7rem; font-variant-numeric: tabular-nums; }
.curves { display: grid; gap: 0.5rem; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); }
svg { width: 100%; height: auto; } video { width: 100%; height: auto; background: #000; border-radius: 0.25rem; }
.videos { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); }
figure { margin: 0; } figcaption { font-size: 0.9rem; } .sides { display: flex; justify-content: space-around; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; }
td, th { padding: 0.25rem 0.75rem 0.25rem 0; text-align: right; border-bottom: 1px solid #d0d7de;
  font-variant-numeric: tabular-nums; } td:first-child, th:first-child, td.text { text-align: left; }
code { font-size: 0.85rem; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class RunFiles:
    """What a run directory holds; None or empty where it does not hold it."""

    directory: Path
    demo: dict[str, Any] | None
    ppo_config: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    sft: dict[str, Any] | None
    result: dict[str, Any] | None
    servers: list[dict[str, str]]
    phases: dict[str, dict[str, float]]
    videos: list[SideBySide]


def load_run(directory: Path) -> RunFiles:
    """Read a directory of `worldserve demo` or `worldserve ppo`. Raises FileNotFoundError when it is neither."""
    ppo = directory / "ppo" if (directory / "ppo").is_dir() else directory
    run = RunFiles(
        directory=directory,
        demo=_json(directory / "demo.json"),
        ppo_config=_json(ppo / "config.json"),
        metrics=read_jsonl(ppo / "metrics.jsonl"),
        sft=_json(directory / "evaluate" / "sft" / "result.json"),
        result=_json(directory / "evaluate" / "ppo" / "result.json"),
        servers=_json(directory / "servers.json") or [],
        phases=_json(directory / "phases.json") or {},
        videos=load_videos(directory / "videos"),
    )
    if run.demo is None and not run.metrics:
        raise FileNotFoundError(
            f"run: expected a directory of `worldserve demo` or `worldserve ppo`; got {directory}, which holds neither "
            "demo.json nor metrics.jsonl"
        )
    return run


def _json(path: Path) -> Any:
    return read_json(path) if path.exists() else None


def render(run: RunFiles) -> str:
    """The page of a run."""
    sections = [_headline(run), _curves(run), _videos(run), _servers(run), _costs(run), _settings(run)]
    title = "PPO in the world model, judged in the simulator" if run.demo else f"Run {run.directory.name}"
    return page(title, sections)


def page(title: str, sections: Sequence[str]) -> str:
    """A whole page; sections that are "" are left out."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body>\n</html>\n"
    )


def write_report(directory: Path, out: Path | None = None) -> Path:
    """Write the page of the run in `directory` to `out` (default: DIRECTORY/report.html), atomically."""
    out = out or directory / "report.html"
    page = render(load_run(directory))
    replace_text(out, page)
    return out


# Sections --------------------------------------------------------------------------------------------------------


def _headline(run: RunFiles) -> str:
    figures, notes = [], []
    if run.sft and "success" in run.sft:
        figures.append(_figure("SFT policy", _rate(run.sft["success"])))
    if run.result and "success" in run.result:
        figures.append(_figure("after PPO in the world model", _rate(run.result["success"])))
    gain = run.result.get("success_gain") if run.result else None
    if gain:
        figures.append(_figure("paired gain", _gain(gain)))
        notes.append(judge_gain(gain))
    if not figures:
        return "<p>No evaluation yet: the run was interrupted, or is no demo.</p>" if run.demo else ""
    rated = (run.result or run.sft or {}).get("success") or {}
    seeds = (run.demo or {}).get("evaluation_seeds", [])
    episodes = f"{len(seeds)} episodes" if len(seeds) > 1 else "1 episode"
    notes.append(
        f"Success in the simulator on {rated.get('count')} sealed initial states, {episodes} each, "
        f"the same states and noise for both policies. Brackets: {rated.get('confidence', 0):.0%} interval, bootstrap "
        "over states."
    )
    if (run.demo or {}).get("tiny"):
        notes.append("A tiny run: it shows that every part works, its figures mean nothing.")
    text = "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)
    return f'<h2>Success in the simulator</h2><div class="figures">{"".join(figures)}</div>{text}'


def judge_gain(gain: Mapping[str, Any]) -> str:
    """What an interval of the paired gain allows to say."""
    if gain["low"] > 0:
        return "The whole interval of the gain lies above 0: the policy got better."
    if gain["high"] < 0:
        return "The whole interval of the gain lies below 0: the policy got worse."
    return "The interval of the gain includes 0: this run does not show a difference."


def _figure(name: str, value: tuple[str, str]) -> str:
    return f'<div class="figure">{html.escape(name)}<b>{value[0]}</b>{value[1]}</div>'


def _rate(interval: Mapping[str, Any]) -> tuple[str, str]:
    return f"{interval['value']:.1%}", f"[{interval['low']:.1%}, {interval['high']:.1%}]"


def _gain(interval: Mapping[str, Any]) -> tuple[str, str]:
    value, low, high = (100.0 * interval[name] for name in ("value", "low", "high"))
    return f"{value:+.1f} points", f"[{low:+.1f}, {high:+.1f}]"


def _curves(run: RunFiles) -> str:
    warm_up = int((run.ppo_config or {}).get("critic_warmup_iterations", 0))
    plots = [plot for title, columns in CURVES if (plot := curve(run.metrics, title, columns, warm_up))]
    if not plots:
        return ""
    episodes = sum(int(row.get("env/episodes") or 0) for row in run.metrics)
    note = f"{len(run.metrics)} iterations, {episodes} episodes."
    if warm_up:
        note += f" Grey: the first {warm_up} iterations, which train the critic alone."
    return f'<h2>Training</h2><p class="note">{note}</p><div class="curves">{"".join(plots)}</div>'


def curve(rows: Sequence[Mapping[str, Any]], title: str, columns: Mapping[str, str], warm_up: int = 0) -> str:
    """Columns of `rows` over their iteration (from 1) as an inline SVG; "" when no row has any of them."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shown = {name: label for name, label in columns.items() if any(row.get(name) is not None for row in rows)}
    if not shown:
        return ""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif", "font.size": 11}):
        figure = Figure(figsize=(4.6, 2.9), layout="constrained")
        axes = figure.add_subplot()
        if warm_up:
            axes.axvspan(0.5, warm_up + 0.5, color="#eaeef2", linewidth=0)
        for colour, (name, label) in zip(COLOURS, shown.items(), strict=False):
            points = [(row["iteration"] + 1, math.nan if row.get(name) is None else row[name]) for row in rows]
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=label, markersize=4, linewidth=1.5)
        if any(shown.values()):
            axes.legend(frameon=False, fontsize=10)
        axes.set_title(title, fontsize=12)
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    svg = text.getvalue()
    return f'<div role="img" aria-label="{html.escape(title)}">{svg[svg.index("<svg") :]}</div>'


def _videos(run: RunFiles) -> str:
    figures = []
    for video in run.videos:
        path = run.directory / "videos" / video.video
        if path.exists():
            data = base64.b64encode(path.read_bytes()).decode("ascii")
            figures.append(
                '<figure><div class="sides note"><span>simulator</span><span>world model</span></div>'
                f'<video controls muted loop playsinline preload="metadata" src="data:video/mp4;base64,{data}"></video>'
                f"<figcaption>{html.escape(caption(video))}</figcaption></figure>"
            )
    if not figures:
        return ""
    return (
        '<h2>The same actions in both</h2><p class="note">The policy acted in the simulator (left); the actions '
        "executed there then ran in the world model (right), from the same first frame.</p>"
        f'<div class="videos">{"".join(figures)}</div>'
    )


def caption(video: SideBySide) -> str:
    """What each side made of an episode."""
    truth = {True: "success", False: "failure", None: "outcome unknown"}[video.simulator_success]
    parts = [f"{video.initial_state_id}: {truth} in the simulator"]
    sides = {
        "simulator": (video.simulator_verdict, video.simulator_peak),
        "world model": (video.world_model_verdict, video.world_model_peak),
    }
    for side, (verdict, peak) in sides.items():
        if verdict is not None and peak is not None:
            parts.append(f"reward model in the {side}: {'success' if verdict else 'failure'} (peak {peak:.3f})")
    return "; ".join(parts)


def _servers(run: RunFiles) -> str:
    if not run.servers:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(row['name'].replace('_', ' '))}</td>"
        f'<td class="text"><code>{html.escape(row["interface_fingerprint"])}</code></td>'
        f'<td class="text"><code>{html.escape(row["provenance_fingerprint"])}</code></td></tr>'
        for row in run.servers
    )
    return (
        '<h2>Contracts</h2><p class="note">Fingerprints of interface and provenance, as the servers gave them.</p>'
        f'<div class="wide"><table><tr><th>server</th><th>interface</th><th>provenance</th></tr>{rows}</table></div>'
    )


def _costs(run: RunFiles) -> str:
    if not run.phases:
        return ""
    known = [phase for phase in PHASES if phase in run.phases]
    phases = known + sorted(set(run.phases) - set(known))
    processes = sorted({name for phase in run.phases.values() for name in phase if name != WALL})
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in processes)
    body = ""
    for phase in [*phases, "all"]:
        costs = run.phases.get(phase) or _total(run.phases)
        cpu = [costs.get(name, 0.0) for name in processes]
        cells = "".join(f"<td>{seconds:.0f}</td>" for seconds in [*cpu, sum(cpu), costs[WALL]])
        body += f"<tr><td>{html.escape(phase)}</td>{cells}</tr>"
    return (
        '<h2>Cost</h2><p class="note">CPU-seconds by phase and process, and seconds that passed.</p><div class="wide">'
        f"<table><tr><th>phase</th>{head}<th>CPU in all</th><th>passed</th></tr>{body}</table></div>"
    )


def _total(phases: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    names = {name for phase in phases.values() for name in phase}
    return {name: sum(phase.get(name, 0.0) for phase in phases.values()) for name in names}


def _settings(run: RunFiles) -> str:
    settings: dict[str, Any] = {f"ppo.{name}": value for name, value in (run.ppo_config or {}).items()}
    settings |= run.demo or {}
    if not settings:
        return ""
    rows = "".join(
        f'<tr><td>{html.escape(name)}</td><td class="text"><code>{html.escape(str(value))}</code></td></tr>'
        for name, value in sorted(settings.items())
    )
    return f'<h2>Settings</h2><details><summary>all</summary><div class="wide"><table>{rows}</table></div></details>'


# The command -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportConfig:
    """One self-contained HTML page about a run or a study."""

    run: tyro.conf.Positional[Path]
    """Directory that `worldserve demo` or `worldserve ppo` wrote, or a study's results (results/study/NAME)."""
    out: Path | None = None
    """The page (none: RUN/report.html, for a study RUNS/NAME/report.html)."""
    runs: Path = Path("runs/study")
    """A study's heavy files, among which videos of exploits may be."""
    forks: tuple[Path, ...] = ()
    """With a study: directories of `worldserve forks`, of the world model that it trained in."""
    videos: tuple[Path, ...] = ()
    """With a study: more directories of videos with an index, as of `worldserve fidelity`."""


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve report`."""
    config = tyro.cli(ReportConfig, args=argv, prog="worldserve report", description=__doc__)
    try:
        if (config.run / FROZEN).is_file():
            from services.trainer.study_report import write_study_report

            print(write_study_report(config.run, config.runs, config.out, config.forks, config.videos))
        else:
            print(write_report(config.run, config.out))
    except (OSError, ValueError) as error:
        print(f"worldserve report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
