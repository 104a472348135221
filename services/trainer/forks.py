"""Action forks: starts from which the actions decide, and whether a world model follows them. `worldserve forks`.

    worldserve forks runs/rollouts --fidelity runs/fidelity/base --split train --record runs/pairs \\
        --target 127.0.0.1:50052 --reference 127.0.0.1:50051 --out runs/forks/base-train
    worldserve forks runs/held-out --fidelity runs/fidelity/base-held-out --split unseen --pairs 300 \\
        --target 127.0.0.1:50052 --reference 127.0.0.1:50051 --out runs/forks/base-unseen

DATA are the recorded episodes that `worldserve fidelity` measured into --fidelity. Three things come of them:

- mixed states, those with both outcomes among their rollouts: fake success, recall and discrimination there, against
  states with a single outcome. A model that draws what usually happens from a start is found out there.
- the floor: how often the simulator's own outcome flips when the start moves by half a pixel, in four directions. Fake
  success on mixed states is read above the floor's share of failures that become successes (`above_floor`).
- counterfactual pairs: recorded successes, and the smallest perturbation of a few that makes the simulator fail, both
  run in the target from the same start. --record keeps them with all frames, as training data, from train states only.

Intervals are percentile bootstraps over initial states. The same command goes on where it was stopped; --pairs and
--floor-episodes may grow, and --skip-floor and --skip-pairs leave a part for another call.
"""

from __future__ import annotations

import dataclasses
import itertools
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from services.trainer.calls import resumable
from services.trainer.counterfactual_pairs import (
    PairFinder,
    PairSettings,
    pair_candidates,
    record_pairs,
    shuffled,
    summarise_pairs,
)
from services.trainer.directories import Results
from services.trainer.fork_states import Row, mixed_states, read_fidelity_rows, summarise_states
from services.trainer.perturbation import KINDS, Kind
from services.trainer.shifts import HALF_PIXEL_MM, half_pixel_shifts, measure_floor, summarise_floor
from worldserve.settings import refuse_changed_settings

if TYPE_CHECKING:
    from rich.progress import Progress

    from worldserve.client import EnvironmentClient
    from worldserve.contract import Contract
    from worldserve.episodes import EpisodeReader

SUMMARY = "Whether a world model follows the actions from one start: mixed states, pairs, and the floor."
PURPOSES = {"train": ("train",), "unseen": ("validation", "test")}
"""Purposes of initial states by split."""
FLOOR, PAIRS, RESULT = "floor.jsonl", "pairs.jsonl", "result.json"
FORKS = Results("a measurement of forks", "forks.json", can_be_fresh=False)


@dataclass(frozen=True)
class ForksConfig:
    """Action forks of a target."""

    data: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of recorded episodes, read as one: those that the fidelity run measured."""
    fidelity: Path
    """Directory of a finished `worldserve fidelity` of the same target on those episodes."""
    target: str
    """HOST:PORT of the world model, served with --reward."""
    reference: str
    """HOST:PORT of the simulator; its ground truth counts."""
    out: Path
    """Directory of the results; a call with the same settings goes on there."""
    split: Literal["train", "unseen"]
    """Whether the target was trained on episodes from these states: "train" takes train states alone, "unseen" those of
    validation and test."""
    pairs: int = 200
    """How many counterfactual pairs."""
    floor_episodes: int = 0
    """How many of the episodes the floor is measured on, drawn at random (0: all)."""
    skip_pairs: bool = False
    """Leave the pairs for another call."""
    skip_floor: bool = False
    """Leave the floor for another call."""
    record: Path | None = None
    """Also write both members of every pair here with all their frames; with --split train."""
    shift_x_mm: float = HALF_PIXEL_MM["x"]
    """Half a pixel at the bottle along world x, through the default camera (derived in services/trainer/shifts.py).
    `worldserve admit` takes no other floor."""
    shift_y_mm: float = HALF_PIXEL_MM["y"]
    """Half a pixel at the bottle along world y."""
    kinds: tuple[Kind, ...] = KINDS
    """Perturbations: "offset" (tool displaced in one direction), "modes" (low cosine modes of the joints), "gripper"
    (closing earlier or later)."""
    sizes_mm: tuple[float, ...] = (4.0, 8.0, 14.0, 22.0, 34.0, 50.0)
    """Sizes of "offset" and "modes" to try, growing: the tool centre's largest displacement."""
    sizes_actions: tuple[float, ...] = (3.0, 6.0, 10.0, 16.0, 24.0)
    """Sizes of "gripper" to try, growing: by how many actions (60 ms each) it closes earlier or later."""
    seed: int = 0
    """Of the perturbations and of the order in which episodes are taken."""
    batch: int = 32
    """Episodes open in a server at once."""
    confidence: float = 0.90
    """Of all intervals."""
    bootstrap_seed: int = 0
    """Of the bootstrap over states."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data: expected at least one directory of recorded episodes; got none")
        if min(self.pairs, self.floor_episodes) < 0 or self.batch < 1:
            raise ValueError(
                "pairs, floor_episodes, batch: expected at least 0, 0 (all) and 1; "
                f"got {self.pairs}, {self.floor_episodes} and {self.batch}"
            )
        if not (0 < self.shift_x_mm <= 50 and 0 < self.shift_y_mm <= 50):
            raise ValueError(
                f"shift_x_mm, shift_y_mm: expected above 0 and at most 50; got {self.shift_x_mm}, {self.shift_y_mm}"
            )
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence: expected a number between 0 and 1; got {self.confidence}")
        if not self.kinds or len(set(self.kinds)) != len(self.kinds):
            raise ValueError(f"kinds: expected some of {', '.join(KINDS)}, each once; got {self.kinds}")
        for name in ("sizes_mm", "sizes_actions"):
            sizes = getattr(self, name)
            if not sizes or min(sizes) <= 0 or not all(a < b for a, b in itertools.pairwise(sizes)) or sizes[-1] > 200:
                raise ValueError(f"{name}: expected growing sizes above 0 and at most 200; got {sizes}")
        if any(size != round(size) for size in self.sizes_actions):
            raise ValueError(f"sizes_actions: expected whole numbers of actions; got {self.sizes_actions}")
        if self.record is not None and self.skip_pairs:
            raise ValueError("record: expected pairs to record; got --skip-pairs as well. Leave one of them out.")
        if self.record is not None and self.split == "unseen":
            raise ValueError(
                "record: expected --split train, since recorded pairs are training data; got --split unseen. Leave "
                "--record out, or record pairs of train states."
            )

    def held(self) -> dict[str, Any]:
        """What rows in `out` depend on, beside the servers: a call with other values would mix two measurements."""
        names = ("split", "shift_x_mm", "shift_y_mm", "kinds", "sizes_mm", "sizes_actions", "seed")
        return {"data": self.data, **{name: getattr(self, name) for name in names}}


def summarise(
    rows: Sequence[Row], floor: Sequence[Row], pairs: Sequence[Row], confidence: float, seed: int
) -> dict[str, Any]:
    """Everything that follows from the rows of the fidelity run, of the floor and of the pairs."""
    mixed = mixed_states(rows)
    single = {row["initial_state_id"] for row in rows} - mixed
    return {
        "mixed": summarise_states(rows, floor, mixed, confidence, seed),
        "single": summarise_states(rows, floor, single, confidence, seed),
        "floor": summarise_floor(floor, mixed, confidence, seed),
        "pairs": summarise_pairs(pairs, confidence, seed),
    }


@dataclass(frozen=True)
class _Servers:
    """Both servers and what they are."""

    target: EnvironmentClient
    reference: EnvironmentClient
    target_contract: Contract
    reference_contract: Contract

    @classmethod
    def checked(cls, target: EnvironmentClient, reference: EnvironmentClient) -> _Servers:
        """Raises ValueError where a server is of the wrong kind, gives no verdict or has another interface."""
        from services.trainer.run_facts import check_reward_source

        servers = cls(target, reference, target.get_contract(), reference.get_contract())
        kind = servers.reference_contract.provenance.kind
        if kind != "simulator":
            raise ValueError(f"reference: expected a simulator, whose truth counts; {reference.target} is a {kind}.")
        check_reward_source(servers.target_contract, target.target, "verdict")
        target.check_interface()
        reference.check_interface()
        return servers

    def identity(self) -> dict[str, Any]:
        """What was measured against what, for `worldserve admit`."""
        from services.trainer.run_facts import contract_fingerprints, target_identity

        return {
            **target_identity(self.target_contract),
            "reference_provenance": contract_fingerprints(self.reference_contract)["provenance"],
        }


def run(config: ForksConfig) -> dict[str, Any]:
    """Measures what is missing in `out`, writes `result.json` and returns it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from services.trainer.run_record import read_jsonl, write_json
    from worldserve.client import EnvironmentClient
    from worldserve.episodes import EpisodeReader, refuse_for_training
    from worldserve.files import file_sha256

    rows, reader = read_fidelity_rows(config.fidelity), EpisodeReader(config.data)
    rows = _measured(rows, reader, config)
    _check_purposes(rows, config)
    if config.record is not None:
        refuse_for_training(row["initial_state_id"] for row in rows)
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        ExitStack() as stack,
        EnvironmentClient(config.target) as target,
        EnvironmentClient(config.reference) as reference,
    ):
        servers = _Servers.checked(target, reference)
        identity = servers.identity()
        _check_fidelity(config, identity)
        # What is drawn is part of the target's provenance.
        held = {**config.held(), **{name: value for name, value in identity.items() if name != "target_drawn"}}
        stack.enter_context(FORKS.claim(config.out, held))
        _write_run(config, identity, servers)
        with Progress(*columns, console=Console(stderr=True)) as bars:
            if not config.skip_floor:
                _floor(config, servers, rows, reader, bars)
            if not config.skip_pairs:
                _pairs(config, servers, rows, reader, bars)
    floor, pairs = read_jsonl(config.out / FLOOR), read_jsonl(config.out / PAIRS)
    result = {
        "split": config.split,
        **summarise(rows, floor, pairs, config.confidence, config.bootstrap_seed),
        "identity": identity,
        "shifts_mm": {"x": config.shift_x_mm, "y": config.shift_y_mm},
        "purposes": sorted({row["initial_state_id"].split("/")[1] for row in rows if "/" in row["initial_state_id"]}),
        "fidelity": {"path": config.fidelity, "sha256": file_sha256(config.fidelity / "episodes.jsonl")},
        "settings": dataclasses.asdict(config),
    }
    write_json(config.out / RESULT, result)
    return result


def _measured(rows: Sequence[Row], reader: EpisodeReader, config: ForksConfig) -> list[dict[str, Any]]:
    """The fidelity run's rows of episodes that are in the data."""
    found = [dict(row) for row in rows if row["episode_id"] in reader]
    if not found:
        shown = f"; such as {rows[0]['episode_id']!r}" if rows else ""
        raise ValueError(
            f"fidelity: expected a measurement of the episodes in {', '.join(map(str, config.data))}; none of the "
            f"{len(rows)} in {config.fidelity} is there{shown}"
        )
    return found


def _check_purposes(rows: Sequence[Row], config: ForksConfig) -> None:
    """Raises ValueError for states that are of another purpose than the split, or of none."""
    from worldserve.episodes.initial_states import purpose_of

    expected = PURPOSES[config.split]
    others = sorted({state for state in (row["initial_state_id"] for row in rows) if purpose_of(state) not in expected})
    if others:
        raise ValueError(
            f"split: expected {' or '.join(expected)} states for --split {config.split}; got {len(others)} others, "
            f"such as {others[0]!r}. Name the other split, or the data and the fidelity run of this one."
        )


def _check_fidelity(config: ForksConfig, identity: Mapping[str, Any]) -> None:
    """Raises ValueError where the fidelity run measured another target."""
    from services.trainer.fidelity_result import read_result

    measured = read_result(config.fidelity)
    names = ("target_weights_sha256", "target_provenance", "reward_provenance", "interface")
    refuse_changed_settings(
        {name: getattr(measured, name) for name in names},
        {name: identity[name] for name in names},
        what=f"fidelity: {config.fidelity} measured another target, or by another reward, than {config.target} has",
        advice="Serve that world model again as it was measured, with the --reward that read it, or measure this one "
        "with `worldserve fidelity`.",
    )


def _write_run(config: ForksConfig, identity: Mapping[str, Any], servers: _Servers) -> None:
    from services.trainer.run_facts import write_run

    inputs: dict[str, dict[str, Any]] = {
        "data": {"path": [str(path) for path in config.data]},
        "fidelity": {"path": str(config.fidelity)},
        "reference": {"address": config.reference, "provenance": identity["reference_provenance"]},
    }
    write_run(config.out, "worldserve forks", config.target, servers.target_contract, inputs)


def _floor(config: ForksConfig, servers: _Servers, rows: Sequence[Row], reader: EpisodeReader, bars: Progress) -> None:
    from services.trainer.run_record import append_jsonl, read_jsonl

    path = config.out / FLOOR
    done = {row["episode_id"] for row in read_jsonl(path)}
    wanted = shuffled(rows, config.seed)[: config.floor_episodes or None]
    todo = [row["episode_id"] for row in wanted if row["episode_id"] not in done]
    task = bars.add_task("floor", total=len(wanted), completed=len(wanted) - len(todo))

    def keep(found: list[dict[str, Any]]) -> None:
        append_jsonl(path, found)
        bars.advance(task, len(found))

    shifts = half_pixel_shifts(config.shift_x_mm, config.shift_y_mm)
    chunk_actions = servers.reference_contract.interface.timing.chunk_actions
    measure_floor(servers.reference, (reader.by_id(name) for name in todo), shifts, chunk_actions, config.batch, keep)


def _pairs(config: ForksConfig, servers: _Servers, rows: Sequence[Row], reader: EpisodeReader, bars: Progress) -> None:
    from services.trainer.run_record import append_jsonl, read_jsonl

    path = config.out / PAIRS
    done = read_jsonl(path)
    tried = {row["episode_id"] for row in done}
    found = [row for row in done if row["found"]]
    names = pair_candidates([row for row in rows if row["success"]], config.seed)
    todo = [name for name in names if name not in tried]
    sizes = {"mm": config.sizes_mm, "actions": config.sizes_actions}
    settings = PairSettings(config.kinds, sizes, config.seed)
    finder = PairFinder(servers.reference, servers.target, servers.reference_contract, settings, config.batch)
    task = bars.add_task("pairs", total=config.pairs, completed=min(len(found), config.pairs))
    while todo and len(found) < config.pairs:
        # No more at once than are missing, so that the pairs do not depend on the batch.
        size = min(max(1, config.batch // 2), config.pairs - len(found))
        part, todo = todo[:size], todo[size:]
        made = finder.rows([reader.by_id(name) for name in part])
        append_jsonl(path, made)
        found += [row for row in made if row["found"]]
        bars.advance(task, sum(row["found"] for row in made))
    if len(found) < config.pairs:
        bars.console.print(f"{len(found)} pairs of {config.pairs}: the data have no more successes to perturb")
    if config.record is not None:
        bar = bars.add_task("recorded", total=len(found))
        record_pairs(finder, found, reader, servers.reference_contract, config.record, lambda: bars.advance(bar))


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve forks`: exit status 1 for an error, 130 when it was interrupted."""
    config = tyro.cli(ForksConfig, args=argv, prog="worldserve forks", description=__doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same orderly end as Ctrl-C
    return resumable("forks", lambda: _show(run(config)))


def _show(result: Mapping[str, Any]) -> int:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{result['split']} states", caption=f"{result['settings']['confidence']:.0%} intervals")
    for name in ("", "mixed states", "states of one outcome"):
        table.add_column(name, no_wrap=True)
    for name in ("fake_success", "recall", "discrimination", "above_floor"):
        table.add_row(name.replace("_", " "), *(_text(result[part][name]) for part in ("mixed", "single")))
    table.add_row("states", *(str(result[part]["states"]) for part in ("mixed", "single")))
    table.add_section()
    floor, pairs = result["floor"], result["pairs"]
    for name in ("flip_rate", "failure_to_success", "success_to_failure"):
        label = f"floor: {name.replace('_', ' ')}"
        table.add_row(label, *(_text(floor[part][name]) for part in ("mixed", "single")))
    console.print(table)
    console.print(
        f"floor on {floor['episodes']} episodes of {floor['states']} states: flip rate {_text(floor['flip_rate'])}, "
        f"failure to success {_text(floor['failure_to_success'])}, success to failure "
        f"{_text(floor['success_to_failure'])}; {floor['not_reproduced']} recorded outcomes not reproduced",
        soft_wrap=True,
    )
    shares = ", ".join(f"{name.replace('_', ' ')} {_text(pairs[name])}" for name in ("both_right", "both_success"))
    console.print(f"{pairs['count']} pairs of {pairs['candidates']} candidates: {shares}", soft_wrap=True)
    for size, part in pairs["by_size"].items():
        right, fake = (part[name]["value"] for name in ("both_right", "both_success"))
        console.print(f"  {size}: {part['count']} pairs, both right {right:.2f}, both success {fake:.2f}")
    return 0


def _text(interval: Mapping[str, Any] | None) -> str:
    if interval is None:
        return "no such episode"
    return f"{interval['value']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


if __name__ == "__main__":
    sys.exit(main())
