"""Measured figures: `results/summary.json`, and the page `docs/results.md` that is made from it.

    worldserve results record reward.recall 0.993 --low 0.97 --high 1.0 --n 150 --command "worldserve fit-reward ..."
    worldserve results render            # writes docs/results.md
    worldserve results render --check    # exit status 1 when the page is not what the figures give

The file is a flat map from a dotted key to {value, low, high, n, command, commit, date, note}. A figure says how it was
measured: the command, the commit and the day; low and high bound the 90% interval, null where there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from worldserve.files import replace_text

SUMMARY = "Record a measured figure, or write docs/results.md from all of them."
SUMMARY_PATH = Path("results/summary.json")
PAGE_PATH = Path("docs/results.md")

# What the keys mean, and the goal where one is set (issues A and B). Other keys may be recorded as well.
DESCRIPTIONS: Mapping[str, str] = {
    "sim.expert_success": "Success of the scripted expert on fresh states, share of episodes (goal: at least 0.90)",
    "sim.fk_max_mm": "Largest error of the forward kinematics against the two real episodes, mm (goal: at most 7)",
    "policy.sft_success": "Success of the supervised policy in the simulator, share of episodes (goal: 0.50 to 0.75)",
    "ppo_sim.gain_pp": "Gain of PPO in the simulator over SFT, percentage points, paired over states (goal: 5 or more)",
    "reward.fake_success": "Failed policy rollouts that the reward model reads as success (goal: at most 0.03)",
    "reward.recall": "Successful policy rollouts that the reward model reads as success (goal: at least 0.99)",
    "wm.moving_psnr_gap_db": "World model: PSNR over moving pixels, true minus shuffled actions, dB (goal: at least 3)",
    "fidelity.simulator.fake_success": "Simulator's frames: failed rollouts read as success (goal: at most 0.03)",
    "fidelity.simulator.recall": "Simulator's frames: successful rollouts read as success (goal: at least 0.99)",
    "fidelity.base.fake_success": "World model of successes alone: failures drawn as success (goal: at least 0.50)",
    "fidelity.base.recall": "The same model: successes drawn as success",
    "fidelity.success_only.fake_success": "Trained on, with successes alone, as long as the shipped one: fake success",
    "fidelity.repaired.fake_success": "Shipped world model: failures drawn as success (goal: at most 0.15)",
    "fidelity.repaired.recall": "Shipped world model: successes drawn as success (goal: at least 0.97)",
    "forks.train.fake_success": "Fake success on mixed states of training (goal: at most 0.15 above the floor)",
    "forks.unseen.fake_success": "Fake success on unseen mixed states (goal: at most 0.25 above the floor)",
    "forks.floor": "Simulator's failures on mixed states that half a pixel turns into successes, share of replays",
    "ppo_wm.gain_pp": "Gain of PPO in the world model over SFT, measured in the simulator, percentage points, paired",
    "demo.minutes": "Wall time of `make demo` on two quiet cores, minutes (goal: at most 15)",
}
GROUPS: Mapping[str, str] = {
    "sim": "Simulator",
    "policy": "Policy",
    "ppo_sim": "PPO in the simulator",
    "reward": "Reward model",
    "wm": "World model",
    "fidelity": "Fidelity: what is drawn of recorded actions, sealed test states",
    "forks": "Forks: states with both outcomes",
    "ppo_wm": "PPO in the world model",
    "demo": "Demo",
}
_KEY = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")
_COMMIT = re.compile(r"[0-9a-f]{7,40}(-dirty)?")


@dataclass(frozen=True)
class Figure:
    """One measured figure.

    Attributes:
        value: the point estimate, in the unit that the key's name ends with; finite.
        low, high: bounds of the 90% interval, low <= value <= high; None where there is none.
        n: independent units behind it (episodes, states), at least 1; None where that has no meaning.
        command: what measures it again.
        commit: of the code that measured it, "-dirty" appended where the working tree was not clean.
        date: YYYY-MM-DD.
        note: one line for the reader; may be empty.
    """

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    command: str = ""
    commit: str = ""
    date: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
            number = getattr(self, name)
            if number is None and name != "value":
                continue
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise ValueError(f"{name}: expected a finite number; got {number!r}")
        if (self.low is None) is not (self.high is None):
            raise ValueError(f"low, high: expected both or neither; got {self.low!r}, {self.high!r}")
        if self.low is not None and self.high is not None and not self.low <= self.value <= self.high:
            raise ValueError(f"low, high: expected low <= value <= high; got {self.low} {self.value} {self.high}")
        if self.n is not None and (isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1):
            raise ValueError(f"n: expected a count of at least 1, or none; got {self.n!r}")
        if not isinstance(self.command, str) or not self.command.strip():
            raise ValueError("command: expected what measures the figure again; got ''")
        if not _COMMIT.fullmatch(self.commit):
            raise ValueError(f"commit: expected 7 to 40 hex digits; got {self.commit!r}")
        try:
            datetime.date.fromisoformat(self.date)
        except (TypeError, ValueError):
            raise ValueError(f"date: expected YYYY-MM-DD; got {self.date!r}") from None
        if not isinstance(self.note, str) or "\n" in self.note:
            raise ValueError(f"note: expected one line; got {self.note!r}")


def load(path: Path = SUMMARY_PATH) -> dict[str, Figure]:
    """The figures by key, in order; an absent file holds none.

    Raises:
        ValueError: naming the key and the field that is not as the module says.
    """
    if not path.exists():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: expected JSON; {error}") from error
    if not isinstance(stored, dict):
        raise ValueError(f"{path}: expected a map from keys to figures; got {type(stored).__name__}")
    names = {field.name for field in fields(Figure)}
    figures = {}
    for key, entry in stored.items():
        _check_key(key)
        if not isinstance(entry, dict) or set(entry) != names:
            got = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
            raise ValueError(f"{path}: {key}: expected exactly {sorted(names)}; got {got}")
        try:
            figures[key] = Figure(**entry)
        except ValueError as error:
            raise ValueError(f"{path}: {key}.{error}") from error
    return dict(sorted(figures.items()))


def record(
    key: str,
    value: float,
    low: float | None = None,
    high: float | None = None,
    n: int | None = None,
    *,
    command: str,
    note: str = "",
    commit: str | None = None,
    date: str | None = None,
    path: Path = SUMMARY_PATH,
) -> Figure:
    """Writes (or replaces) one figure; the file is replaced whole, and writers wait for each other.

    Args:
        key: dotted, for example "reward.recall".
        value, low, high, n, command, note: as in `Figure`.
        commit: None takes the repository's HEAD, with "-dirty" where tracked files have changed.
        date: None takes today, in UTC.

    Raises:
        ValueError: for a figure that is not as `Figure` says.
    """
    _check_key(key)
    figure = Figure(
        value=float(value),
        low=None if low is None else float(low),
        high=None if high is None else float(high),
        n=n,
        command=command,
        commit=current_commit() if commit is None else commit,
        date=datetime.datetime.now(datetime.UTC).date().isoformat() if date is None else date,
        note=note,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        figures = load(path) | {key: figure}
        stored = {name: asdict(entry) for name, entry in sorted(figures.items())}
        replace_text(path, json.dumps(stored, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return figure


def current_commit(directory: Path | None = None) -> str:
    """HEAD's hash, 12 digits, "-dirty" appended where tracked files have changed.

    Raises:
        ValueError: outside a git repository.
    """
    try:
        head = _git(["rev-parse", "--short=12", "HEAD"], directory)
        dirty = _git(["status", "--porcelain", "--untracked-files=no"], directory)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"commit: expected a git repository, or --commit; {error}") from error
    return head + ("-dirty" if dirty else "")


def render(figures: Mapping[str, Figure]) -> str:
    """The page of all figures, Markdown: a section a group, known groups and keys first."""
    lines = [
        "# Results",
        "",
        "Generated by `worldserve results render` from `results/summary.json`; change that, not this.",
        "Intervals are 90%. `n` counts independent units: episodes, or initial states where outcomes are paired.",
        "",
    ]
    order = {key: position for position, key in enumerate(DESCRIPTIONS)}
    for group in sorted({key.partition(".")[0] for key in figures}, key=_group_order):
        lines += [f"## {GROUPS.get(group, group)}", ""]
        lines += ["| figure | value | 90% interval | n | measured |", "|---|---|---|---|---|"]
        keys = sorted((k for k in figures if k.partition(".")[0] == group), key=lambda k: (order.get(k, len(order)), k))
        notes = []
        for key in keys:
            figure = figures[key]
            interval = (
                "" if figure.low is None or figure.high is None else f"{_number(figure.low)} to {_number(figure.high)}"
            )
            count = "" if figure.n is None else f"{figure.n:,}"
            lines.append(
                f"| `{key}` | {_number(figure.value)} | {interval} | {count} | {figure.date}, `{figure.commit}` |"
            )
            text = ". ".join(part.rstrip(".") for part in (DESCRIPTIONS.get(key, ""), figure.note) if part)
            notes.append(f"- `{key}`: {text + '. ' if text else ''}Command: `{figure.command}`")
        lines += ["", *notes, ""]
    missing = [key for key in DESCRIPTIONS if key not in figures]
    if missing:
        lines += ["## Not measured yet", "", *(f"- `{key}`: {DESCRIPTIONS[key]}" for key in missing), ""]
    return "\n".join(lines)


def _group_order(group: str) -> tuple[int, str]:
    names = list(GROUPS)
    return (names.index(group) if group in names else len(names), group)


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(f"key: expected lower-case names joined by dots, as in 'reward.recall'; got {key!r}")


def _git(arguments: Sequence[str], directory: Path | None) -> str:
    done = subprocess.run(["git", *arguments], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The directory itself is locked: a file beside the figures would be one more to explain."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "worldserve results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="record|render")
    recorder = commands.add_parser("record", help="add or replace one figure")
    recorder.add_argument("key", help="dotted key, for example reward.recall")
    recorder.add_argument("value", type=float)
    recorder.add_argument("--low", type=float, help="lower bound of the 90%% interval")
    recorder.add_argument("--high", type=float, help="upper bound")
    recorder.add_argument("--n", type=int, help="independent units behind it")
    recorder.add_argument("--command", required=True, help="what measures it again")
    recorder.add_argument("--note", default="", help="one line for the reader")
    recorder.add_argument("--commit", help="of the code that measured it (none: HEAD)")
    recorder.add_argument("--date", help="YYYY-MM-DD (none: today)")
    renderer = commands.add_parser("render", help="write the page")
    renderer.add_argument("--check", action="store_true", help="write nothing; exit status 1 when the page is stale")
    for command in (recorder, renderer):
        command.add_argument("--summary", type=Path, default=SUMMARY_PATH, metavar="FILE", help=f"({SUMMARY_PATH})")
    renderer.add_argument("--page", type=Path, default=PAGE_PATH, metavar="FILE", help=f"({PAGE_PATH})")
    return parser


def _record(arguments: argparse.Namespace) -> int:
    names = ("value", "low", "high", "n", "command", "note", "commit", "date")
    values: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    figure = record(arguments.key, **values, path=arguments.summary)
    print(f"{arguments.key}: {_number(figure.value)} ({figure.date}, {figure.commit}) in {arguments.summary}")
    return 0


def _render(arguments: argparse.Namespace) -> int:
    text = render(load(arguments.summary))
    if arguments.check:
        if arguments.page.exists() and arguments.page.read_text(encoding="utf-8") == text:
            return 0
        print(f"{arguments.page}: not what {arguments.summary} gives; run `worldserve results render`", file=sys.stderr)
        return 1
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    replace_text(arguments.page, text)
    print(f"{arguments.page}: written")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve results`."""
    arguments = _parser().parse_args(argv)
    try:
        return _record(arguments) if arguments.action == "record" else _render(arguments)
    except (OSError, ValueError) as error:
        print(f"worldserve results: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
