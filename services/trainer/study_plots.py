"""Plots of a study as inline SVG: gains of runs, effects of fixes, learning curves of an arm's seeds."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from services.trainer.statistics import Interval
from services.trainer.study_statistics import RunGain

COLOURS = ("#1763a6", "#c2571a", "#2a7f4f", "#8a3fa0", "#6b6b6b", "#a6761d", "#c2185b", "#00838f")


def gains_plot(gains: Sequence[RunGain]) -> str:
    """Every run's gain with its interval, arms below each other; "" for none."""
    if not gains:
        return ""
    with _figure("Gain of every run, percentage points", 7.6, 0.9 + 0.2 * len(gains)) as (axes, svg):
        arms = list(dict.fromkeys((gain.arm, gain.world_model) for gain in gains))
        for place, gain in enumerate(gains):
            colour = COLOURS[arms.index((gain.arm, gain.world_model)) % len(COLOURS)]
            _bar(axes, place, gain.gain, colour)
        axes.set_yticks(range(len(gains)), [f"{gain.arm} {gain.world_model} {gain.seed}" for gain in gains], fontsize=8)
    return svg[0]


def effects_plot(effects: Mapping[str, Interval]) -> str:
    """Effects with their intervals, in the order given; "" for none."""
    if not effects:
        return ""
    with _figure("Effects on the gain, percentage points", 7.6, 0.9 + 0.28 * len(effects)) as (axes, svg):
        for place, interval in enumerate(effects.values()):
            _bar(axes, place, interval, COLOURS[0])
        axes.set_yticks(range(len(effects)), list(effects), fontsize=9)
    return svg[0]


def seed_curves(rows: Mapping[str, Sequence[Mapping[str, Any]]], column: str, title: str) -> str:
    """One line a run over its iterations (from 1); "" where no run has the column.

    Args:
        rows: metrics by the run's label.
    """
    shown = {label: own for label, own in rows.items() if any(row.get(column) is not None for row in own)}
    if not shown:
        return ""
    with _figure(title, 4.6, 2.9) as (axes, svg):
        for place, (label, own) in enumerate(shown.items()):
            points = [(row["iteration"] + 1, math.nan if row.get(column) is None else row[column]) for row in own]
            colour = COLOURS[place % len(COLOURS)]
            axes.plot(*zip(*points, strict=True), "-", color=colour, label=label, linewidth=1.3)
        axes.set_xlabel("iteration")
        axes.legend(frameon=False, fontsize=7)
    return svg[0]


def _bar(axes: Any, place: int, interval: Interval, colour: str) -> None:
    below, above = interval.value - interval.low, interval.high - interval.value
    axes.errorbar(
        interval.value, place, xerr=[[max(below, 0.0)], [max(above, 0.0)]], fmt="o", color=colour, markersize=4,
        capsize=2, linewidth=1.3,
    )  # fmt: skip


@contextmanager
def _figure(title: str, width: float, height: float) -> Iterator[tuple[Any, list[str]]]:
    """Axes to draw on, and a list that holds the SVG afterwards. The same figures give the same bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    svg: list[str] = []
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif", "font.size": 10}):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        yield axes, svg
        if not axes.get_legend():
            axes.axvline(0.0, color="#57606a", linewidth=0.8)
            axes.invert_yaxis()
        axes.set_title(title, fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    drawn = text.getvalue()
    svg.append(f'<div role="img" aria-label="{html.escape(title)}">{drawn[drawn.index("<svg") :]}</div>')
