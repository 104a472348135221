"""How far a job is, read from the files that its command writes; nothing is written here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.trainer.commands import Command
from worldserve.jobs import JobProgress, LogChunk, MetricsRow

LOG_PIECE_BYTES = 64 << 10
RESULT_BYTES = 256 << 10
METRICS, EPISODES, RESULT = "metrics.jsonl", "episodes.jsonl", "result.json"


def expected(command: Command, settings: Mapping[str, Any]) -> tuple[int, str]:
    """(total, unit) of a command's progress as its settings say; 0 where they do not."""
    merged = {**command.recipe_settings(settings), **settings}

    def value(name: str) -> Any:
        return merged.get(name, getattr(command.settings_class, name, None))

    if command.has("iterations"):
        return int(value("iterations")), "iterations"
    if command.has("evaluation_seeds"):
        states = Path(value("initial_states")) / "states.jsonl"
        count = sum(1 for line in states.read_text().splitlines() if line) if states.is_file() else 0
        return min(count, value("max_states") or count) * len(value("evaluation_seeds")), "episodes"
    return 0, "rows" if command.has("max_steps") else "episodes"


def progress_of(out: Path, total: int, unit: str) -> JobProgress:
    """Iterations and rows are counted in metrics.jsonl, episodes in episodes.jsonl."""
    if unit != "iterations":
        done = _count_lines(out / (METRICS if unit == "rows" else EPISODES))
    else:
        rows = whole_rows(out / METRICS)
        done = int(rows[-1].get("iteration", len(rows) - 1)) + 1 if rows else 0
    return JobProgress(min(done, total) if total else done, total, unit)


def whole_rows(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a JSONL file that another process is writing; none where there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    rows = []
    for line in text[: text.rfind("\n") + 1].splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def newest_metrics(out: Path) -> dict[str, float]:
    """Finite numbers of the last row of metrics."""
    rows = whole_rows(out / METRICS)
    return finite_numbers(rows[-1]) if rows else {}


def metrics_from(out: Path, offset: int) -> list[MetricsRow]:
    """Rows of metrics from number `offset` on."""
    rows = whole_rows(out / METRICS)
    return [MetricsRow(number + 1, finite_numbers(rows[number])) for number in range(offset, len(rows))]


def finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """A row's finite numbers by name."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def result_of(out: Path) -> str:
    """The command's result.json; "" where there is none, or where it is too large to send."""
    path = out / RESULT
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= RESULT_BYTES else ""
    except OSError:
        return ""


def log_from(path: Path, offset: int) -> LogChunk | None:
    """The log from byte `offset` on, at most a piece; None where there is nothing new."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(LOG_PIECE_BYTES)
    except OSError:
        return None
    data = _whole_characters(data)
    return LogChunk(offset + len(data), data.decode("utf-8", errors="replace")) if data else None


def _whole_characters(data: bytes) -> bytes:
    """Without the beginning of a UTF-8 character whose end has not been written yet."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 2 if byte >> 5 == 0b110 else 3 if byte >> 4 == 0b1110 else 4 if byte >> 3 == 0b11110 else 1
        return data[:-back] if length > back else data
    return data


def _count_lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0
