"""The same recorded actions in two targets, read by one frozen reward: `worldserve fidelity`.

A world model that draws failures as successes ruins a policy that trains in it, and pixel metrics do not show it. Here
recorded actions drive a reference (the simulator, or its recording) and a target (a world model) open loop, and one
reward server reads the frames of both:

  fake success    failures that are read as success / failures
  recall          successes that are read as success / successes
  discrimination  recall - fake success

A second call with the same settings goes on where the first stopped.

    worldserve fidelity runs/rollouts --target 127.0.0.1:50052 --reward 127.0.0.1:50053 --out runs/fidelity/base
    worldserve fidelity runs/rollouts --reference 127.0.0.1:50051 --target 127.0.0.1:50052 --reward 127.0.0.1:50053
    worldserve fidelity runs/a runs/b --failures 200 --successes 200 --target 127.0.0.1:50052 --reward 127.0.0.1:50053
"""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from services.trainer.calls import resumable
from services.trainer.directories import Results
from services.trainer.fidelity_measurement import (
    PROBABILITIES,
    ROWS,
    VIDEOS,
    Measurement,
    MeasurementSettings,
    Servers,
    Subject,
    data_sha256,
    read_probabilities,
)
from services.trainer.fidelity_result import RESULT, FidelityResult, Rates, read_result, show, summarise
from services.trainer.image_quality import MOVING_THRESHOLD
from services.trainer.open_loop import RecordedTarget, ServedTarget
from services.trainer.run_record import write_json
from worldserve.client import EnvironmentClient, RewardClient
from worldserve.contract import Contract, fingerprint
from worldserve.episodes import EpisodeInfo, EpisodeReader

__all__ = ["FidelityConfig", "FidelityResult", "Rates", "main", "read_probabilities", "read_result", "run"]

SUMMARY = "Fake success, recall and image quality of a world model on recorded actions."
RECORDED = "recorded"
# A data set may have moved; its hash says what it is.
MEASUREMENT = Results(
    "a measurement", "fidelity.json", (ROWS, RESULT, "run.json", PROBABILITIES, VIDEOS), frozenset({"data"})
)


@dataclass(frozen=True)
class FidelityConfig:
    """The same recorded actions in two targets, read by one frozen reward."""

    data: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of recorded episodes."""
    target: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")]
    """What is measured, a world model as a rule."""
    reward: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")]
    """The reward server that reads both sides. The targets' own reward servers, if any, are not asked for anything."""
    reference: Annotated[str, tyro.conf.arg(metavar="HOST:PORT|recorded")] = RECORDED
    """The simulator, or "recorded": the recording's own frames and ground truth, which needs no simulator."""
    out: Path = Path("runs/fidelity")
    """Directory of the results; a call with the same settings goes on there."""
    fresh: bool = False
    """Throw away the measurement that lies in `out`; a directory of anything else is left alone."""
    first: int = 0
    """Position in the data of the first episode."""
    episodes: int = 0
    """At most so many episodes (0: all)."""
    failures: int = 0
    """At most so many episodes recorded as failures, the first ones (0: all)."""
    successes: int = 0
    """At most so many episodes recorded as successes, the first ones (0: all)."""
    states: int = 0
    """Only episodes of the first so many initial states that appear, all their episodes in `data` (0: of all): for
    `worldserve forks`, which needs states with several rollouts."""
    batch: int = 8
    """Episodes open at once in each target; twice as many are held in memory (7 MB each and side at 96x128)."""
    videos: int = 40
    """Side-by-side videos of disagreements (truth against target), at most so many (0: none)."""
    consecutive: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Also rate verdicts that need so many frames in a row above the threshold; 1 is the verdict itself."""
    moving_threshold: float = MOVING_THRESHOLD
    """A pixel moves where the reference differs from its frame 0 by more than this (of 255) in any colour."""
    confidence: float = 0.90
    """Of all intervals."""
    bootstrap_seed: int = 0
    """Of the bootstrap over initial states."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data: expected at least one directory of recorded episodes; got none")
        for name in ("first", "episodes", "failures", "successes", "states", "videos", "bootstrap_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0; got {getattr(self, name)}")
        if self.batch < 1:
            raise ValueError(f"batch: expected at least 1; got {self.batch}")
        if not self.consecutive or min(self.consecutive) < 1 or len(set(self.consecutive)) != len(self.consecutive):
            raise ValueError(f"consecutive: expected distinct numbers of at least 1; got {self.consecutive}")
        if not 0.0 <= self.moving_threshold < 255.0:
            raise ValueError(f"moving_threshold: expected 0 to 255 grey levels; got {self.moving_threshold}")
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(f"confidence: expected a number between 0 and 1; got {self.confidence}")


def choose(infos: Sequence[EpisodeInfo], config: FidelityConfig) -> list[int]:
    """Positions of the episodes to replay, in order."""
    room = {False: config.failures or math.inf, True: config.successes or math.inf, None: math.inf}
    later = infos[config.first :]
    states = set(list(dict.fromkeys(info.initial_state_id for info in later))[: config.states or None])
    chosen: list[int] = []
    for index, info in enumerate(later, start=config.first):
        outcome = info.success
        if (
            info.initial_state_id in states
            and room[outcome] > 0
            and (not config.episodes or len(chosen) < config.episodes)
        ):
            room[outcome] -= 1
            chosen.append(index)
    if not chosen:
        raise ValueError(
            f"data: expected episodes from position {config.first} on; {', '.join(map(str, config.data))} holds "
            f"{len(infos)}"
        )
    return chosen


def load_subjects(reader: EpisodeReader, config: FidelityConfig) -> list[Subject]:
    """The episodes to replay; frames stay in their files."""
    return [Subject(index, reader.infos[index], reader[index]) for index in choose(reader.infos, config)]


def check_subjects(subjects: Sequence[Subject], contract: Contract, config: FidelityConfig, knows_truth: bool) -> None:
    """Raises ValueError, naming the first, for episodes that cannot be compared; nothing has been run then."""
    limit, interface = contract.interface.termination.limit_actions, fingerprint(contract.interface)
    complaints: tuple[tuple[str, str, Callable[[Subject], bool]], ...] = (
        (
            f"episodes of interface {interface}, which {config.target} has",
            "`worldserve contract diff` shows in which fields contracts differ.",
            lambda s: s.info.interface_fingerprint not in ("", interface),
        ),
        (
            f"whole episodes of {limit} actions",
            "Choose others with --first and --episodes.",
            lambda s: s.episode.action_count != limit,
        ),
        (
            "episodes with frames, since --reference is the recording",
            "Name a simulator as --reference, or record with frames.",
            lambda s: config.reference == RECORDED and not s.info.frames_sha256,
        ),
        (
            "episodes with their true success, which this reference does not know",
            "Name a simulator as --reference, or episodes recorded in one.",
            lambda s: not knows_truth and s.info.success is None,
        ),
    )
    for expected, advice, lacks in complaints:
        found = [subject.info.episode_id for subject in subjects if lacks(subject)]
        if found:
            raise ValueError(f"data: expected {expected}; {len(found)} are not, the first: {found[0]}. {advice}")


def connect(config: FidelityConfig, stack: ExitStack) -> Servers:
    """Clients of all servers, each pinned to the server that was found; ValueError where interfaces differ."""
    with EnvironmentClient(config.target) as asking:
        contract = asking.get_contract()
    reward = stack.enter_context(RewardClient(config.reward, timeout_s=600.0, interface=contract.interface))
    reward_contract = reward.get_contract()
    _check_same_interface("reward", config.reward, reward_contract, config.target, contract)
    target = ServedTarget(_pinned(config.target, contract, stack), contract)
    if config.reference == RECORDED:
        return Servers(RecordedTarget(), None, target, contract, reward, config.reward, reward_contract)
    with EnvironmentClient(config.reference) as asking:
        reference_contract = asking.get_contract()
    _check_same_interface("reference", config.reference, reference_contract, config.target, contract)
    reference = ServedTarget(_pinned(config.reference, reference_contract, stack), reference_contract)
    return Servers(reference, reference_contract, target, contract, reward, config.reward, reward_contract)


def _pinned(address: str, contract: Contract, stack: ExitStack) -> EnvironmentClient:
    provenance = fingerprint(contract.provenance)
    client = EnvironmentClient(address, interface=contract.interface, pinned_provenance_fingerprint=provenance)
    return stack.enter_context(client)


def _check_same_interface(name: str, address: str, found: Contract, target: str, contract: Contract) -> None:
    expected, got = fingerprint(contract.interface), fingerprint(found.interface)
    if expected != got:
        raise ValueError(
            f"{name}: expected the interface of {target}, {expected}; {address} has {got}. `worldserve contract diff` "
            "shows in which fields they differ."
        )


def identity(config: FidelityConfig, servers: Servers, subjects: Sequence[Subject]) -> dict[str, Any]:
    """Which very servers and episodes were measured."""
    from services.trainer.run_facts import target_identity

    contract, reference = servers.target_contract, servers.reference_contract
    recorded = sorted({subject.info.provenance_fingerprint for subject in subjects})
    return {
        **target_identity(contract),
        "reference": RECORDED if reference is None else "served",
        # Of a recording: where it was made, several places by commas.
        "reference_provenance": ",".join(recorded) if reference is None else fingerprint(reference.provenance),
        "reward_provenance": fingerprint(servers.reward_contract.provenance),
        "data": ", ".join(map(str, config.data)),
        "data_sha256": data_sha256(subjects),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve fidelity`: exit status 1 when an episode failed, 130 when it was interrupted."""
    config = tyro.cli(FidelityConfig, args=argv, prog="worldserve fidelity", description=__doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same orderly end as Ctrl-C
    return resumable("fidelity", lambda: _tell(run(config)))


def _tell(failed: Mapping[str, str]) -> int:
    for name, reason in failed.items():
        print(f"worldserve fidelity: {name} failed: {reason}", file=sys.stderr)
    if failed:
        count = f"{len(failed)} episodes failed and do not count above"
        print(f"worldserve fidelity: {count}; the same command runs them again", file=sys.stderr)
    return int(bool(failed))


def run(config: FidelityConfig) -> dict[str, str]:
    """Measure, write `result.json` and show it; what failed, by episode id. Refuses before an episode is run."""
    started, cpu = time.perf_counter(), time.process_time()
    subjects = load_subjects(EpisodeReader(config.data), config)
    with ExitStack() as stack:
        servers = connect(config, stack)
        reference = servers.reference_contract
        knows_truth = reference is not None and reference.provenance.kind == "simulator"
        check_subjects(subjects, servers.target_contract, config, knows_truth)
        about = identity(config, servers, subjects)
        held = {name: value for name, value in about.items() if name != "target_drawn"}  # part of the provenance
        held |= {"moving_threshold": config.moving_threshold}
        stack.enter_context(MEASUREMENT.claim(config.out, held, config.fresh))
        _write_run(config, servers, about)
        how = MeasurementSettings(config.out, config.batch, config.videos, config.moving_threshold)
        measurement = Measurement(how, servers, subjects)
        advance = stack.enter_context(_progress(len(subjects), len(subjects) - len(measurement.missing())))
        measurement.run(advance)
    rows = measurement.ordered()
    if not rows:
        raise RuntimeError(f"every episode failed; the first: {next(iter(measurement.failed.values()))}")
    probabilities = [read_probabilities(config.out, row) for row in rows]
    result = summarise(rows, probabilities, config.consecutive, config.confidence, config.bootstrap_seed) | {
        "identity": about,
        "truth": "reference" if knows_truth else RECORDED,
        "failed": [f"{name}: {reason}" for name, reason in measurement.failed.items()],
        "settings": dataclasses.asdict(config),
        "trainer_cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - started,
    }
    write_json(config.out / RESULT, result)
    show(result)
    return measurement.failed


def _write_run(config: FidelityConfig, servers: Servers, about: Mapping[str, Any]) -> None:
    from services.trainer.run_facts import contract_fingerprints, write_run

    def facts(address: str, contract: Contract | None) -> dict[str, Any]:
        if contract is None:
            return {"address": RECORDED, "provenance": about["reference_provenance"]}
        described = {"kind": contract.provenance.kind, "backend": contract.provenance.backend}
        return {"address": address, **described, **contract_fingerprints(contract)} | {
            "facts": dict(contract.provenance.facts)
        }

    inputs = {
        "data": {"path": about["data"], "sha256": about["data_sha256"]},
        "reference": facts(config.reference, servers.reference_contract),
        "reward": facts(config.reward, servers.reward_contract),
        "target": facts(config.target, servers.target_contract),
    }
    write_run(config.out, "worldserve fidelity", config.target, servers.target_contract, inputs)


def _progress(total: int, done: int) -> Any:
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    @contextmanager
    def bar() -> Iterator[Callable[[int], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("episodes", total=total, completed=done)
            yield lambda count: progress.advance(task, count)

    return bar()


if __name__ == "__main__":
    sys.exit(main())
