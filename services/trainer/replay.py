"""Recorded actions replayed in one or several targets, side by side: `worldserve replay`.

    worldserve replay runs/rollouts --target 127.0.0.1:50051 --target 127.0.0.1:50052 --episodes 20
    worldserve replay runs/rollouts --target 127.0.0.1:50051 --target 127.0.0.1:50051     # twice in one: equal hashes

Every line is an episode: what was recorded, and for each target success, verdict, peak and the hash over all frames.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from worldserve.episodes import EpisodeReader
from worldserve.faults import check_faults, open_client
from worldserve.messages import ItemError, ReplayItem, ReplayOutcome

SUMMARY = "Replay recorded actions in simulator and world model, side by side."


@dataclass(frozen=True)
class ReplayConfig:
    """Recorded actions in one or several targets."""

    data: tyro.conf.Positional[Path]
    """Directory of recorded episodes."""
    target: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="HOST:PORT")]
    """A simulator or a world model; give it several times to compare."""
    episodes: int = 0
    """How many episodes, from the first on (0: all)."""
    batch: int = 16
    """Episodes in one call."""
    out: Path | None = None
    """Also write one JSON object an episode here."""
    fault: tuple[str, ...] = ()
    """Interface faults to make on purpose on the way to the target (worldserve.faults); they combine."""

    def __post_init__(self) -> None:
        check_faults(self.fault)
        if not self.target:
            raise ValueError("target: expected at least one HOST:PORT; got none")
        if self.episodes < 0 or self.batch < 1:
            raise ValueError(
                f"episodes, batch: expected at least 0 (all) and at least 1; got {self.episodes} and {self.batch}"
            )


@dataclass(frozen=True)
class ReplayRow:
    """One episode: what was recorded, and its outcome (or error) in each target, in the order of the targets."""

    episode_id: str
    initial_state_id: str
    recorded_success: bool | None
    recorded_frames_sha256: str
    outcomes: tuple[ReplayOutcome | ItemError, ...]


def replay(
    reader: EpisodeReader,
    count: int,
    targets: Sequence[str],
    batch: int = 16,
    on_progress: Callable[[int], None] | None = None,
    faults: Sequence[str] = (),
) -> list[ReplayRow]:
    """Replays the first `count` episodes in every target: the executed actions, from the same state and seed.

    `faults` (worldserve.faults) are made on the way to every target.
    """
    columns: list[dict[str, ReplayOutcome | ItemError]] = []
    for number, target in enumerate(targets):
        outcomes: dict[str, ReplayOutcome | ItemError] = {}
        with open_client(target, faults) as client:
            for first in range(0, count, batch):
                part = [reader[index] for index in range(first, min(first + batch, count))]
                # The target's column number keeps two replays in one server apart.
                names = {f"replay-{number}/{episode.episode_id}": episode.episode_id for episode in part}
                items = [
                    ReplayItem(name, episode.initial_state_id, episode.seed, episode.executed_actions)
                    for name, episode in zip(names, part, strict=True)
                ]
                for name, outcome in client.replay(items):
                    outcomes[names[name]] = outcome
                    if on_progress:
                        on_progress(1)
        columns.append(outcomes)
    return [
        ReplayRow(
            info.episode_id,
            info.initial_state_id,
            info.success,
            info.frames_sha256,
            tuple(column[info.episode_id] for column in columns),
        )
        for info in reader.infos[:count]
    ]


def _text(outcome: ReplayOutcome | ItemError) -> str:
    if isinstance(outcome, ItemError):
        return f"{outcome.code} {outcome.reason}"
    verdict = f"{outcome.verdict.peak:.3f}{'+' if outcome.verdict.success else '-'}" if outcome.verdict else "none"
    success = "unknown" if outcome.success is None else str(outcome.success)
    return f"success {success}, verdict {verdict}, frames {outcome.frames_sha256[:12]}"


def _show(rows: Sequence[ReplayRow], targets: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(rows)} episodes")
    for name in ("episode", "recorded", *targets):
        table.add_column(name, overflow="fold")
    for row in rows:
        recorded = f"success {row.recorded_success}, frames {row.recorded_frames_sha256[:12]}"
        table.add_row(row.episode_id, recorded, *(_text(outcome) for outcome in row.outcomes))
    console = Console()
    console.print(table)
    for number, target in enumerate(targets):
        done = [outcome for row in rows if isinstance(outcome := row.outcomes[number], ReplayOutcome)]
        judged = [outcome.verdict.success for outcome in done if outcome.verdict is not None]
        truth = [outcome.success for outcome in done if outcome.success is not None]
        same = sum(
            isinstance(outcome := row.outcomes[number], ReplayOutcome)
            and outcome.frames_sha256 == row.recorded_frames_sha256
            for row in rows
        )
        console.print(
            f"{target}: {len(done)} of {len(rows)} replayed, success {sum(truth)}/{len(truth)}, "
            f"verdict {sum(judged)}/{len(judged)}, frames as recorded {same}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve replay`: exit status 1 when an episode could not be replayed."""
    from rich.progress import Progress

    config = tyro.cli(ReplayConfig, args=argv, prog="worldserve replay", description=__doc__)
    try:
        reader = EpisodeReader(config.data)
        count = min(config.episodes or len(reader), len(reader))
        with Progress(transient=True) as bar:
            task = bar.add_task("replays", total=count * len(config.target))
            rows = replay(
                reader, count, config.target, config.batch, lambda done: bar.advance(task, done), config.fault
            )
    except (ValueError, OSError, RuntimeError) as error:
        print(f"worldserve replay: {error}", file=sys.stderr)
        return 1
    _show(rows, config.target)
    if config.out is not None:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        made = {"faults": list(config.fault)} if config.fault else {}
        lines = [json.dumps(dataclasses.asdict(row) | made) + "\n" for row in rows]
        config.out.write_text("".join(lines), encoding="utf-8")
    return int(any(isinstance(outcome, ItemError) for row in rows for outcome in row.outcomes))
