"""Closed-loop replay: what of a policy's success in a world model is success in the simulator? `worldserve mismatch`.

    worldserve mismatch --policy runs/ppo/policy --baseline weights/policy-sft \\
        --target 127.0.0.1:50052 --reference 127.0.0.1:50051 --out runs/mismatch/ppo

The policy acts in the target (a world model with a reward server). The executed actions of every episode that is judged
successful there are replayed unchanged in the reference (a simulator) from the same initial state, and the simulator's
ground truth counts. Mismatch is the share of replayed successes that fail there. A policy that learnt to please the
world model has more of it than the policy it started from: the excess over `--baseline`, measured on the same states
and seeds. Rounds of states, then seeds, go on until every checkpoint has `--successes` replayed successes.
The same command goes on where it was stopped; more successes may be asked for.

Source: "RL inside World Models" (October 2026), closed-loop replay mismatch.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from services.trainer.calls import resumable
from services.trainer.closed_loop import Checkpoint, measure
from services.trainer.evaluate import EVALUATION, evaluation_plans
from services.trainer.mismatch_statistics import summarise
from services.trainer.plans import unique_run_name
from services.trainer.policies import find_policy, load_policy
from services.trainer.recipes import parse_command
from services.trainer.rollout import RewardSource
from services.trainer.run_facts import (
    check_policy_interface,
    check_reward_source,
    contract_fingerprints,
    judge_of,
    policy_facts,
    target_identity,
    write_run,
)
from services.trainer.run_record import read_json, write_json
from worldserve.contract import Contract, differences

SUMMARY = "Successes of a policy in a world model, replayed in the simulator."


@dataclass(frozen=True)
class MismatchConfig:
    """Closed-loop replay of a policy's successes."""

    recipe: str | None = None
    """A YAML file of settings; flags win over it."""
    policy: Path = Path("weights/policy-sft")
    """Directory of the policy."""
    baseline: Path | None = None
    """Directory of the policy it is compared with, usually the SFT policy; none: no excess."""
    target: str = "127.0.0.1:50052"
    """HOST:PORT of a world model with a reward server: the policy acts here."""
    reference: str = "127.0.0.1:50051"
    """HOST:PORT of a simulator: successes are replayed here."""
    out: Path = Path("runs/mismatch")
    """Directory of the results; a call with the same settings resumes there."""
    fresh: bool = False
    """Throw away the measurement that lies in `out`; a directory of anything else is left alone."""
    initial_states: Path = Path("initial_states/validation")
    """Sealed set of initial states."""
    max_states: int | None = None
    """Only the first so many states (none: all)."""
    successes: int = 300
    """Replayed successes that every checkpoint needs at least."""
    max_episodes: int = 1200
    """Episodes a checkpoint at most; where the successes are too few by then, the exit status is 1."""
    first_seed: int = 0
    """Seed of the first pass over the states; the next pass takes the next one."""
    mode: Literal["mean", "sample"] = "mean"
    """"mean" acts as evaluation does (only the flow's initial noise is drawn), "sample" explores as training does."""
    noise_level: float | None = None
    """Flow-SDE noise level of "sample", for policy and baseline (none: each one's own)."""
    replay_failures: bool = False
    """Replay what is judged a failure as well: how many of them succeed in the simulator."""
    batch: int = 16
    """Episodes of a round: open at once, and between two looks at whether the successes are enough."""
    policy_batch: int = 16
    """Observations in one policy call."""
    threads: int = 1
    """CPU threads of torch."""
    confidence: float = 0.90
    """Of all intervals."""
    bootstrap_seed: int = 0
    """Of the bootstrap over states."""

    def __post_init__(self) -> None:
        counts = ("successes", "max_episodes", "batch", "policy_batch", "threads")
        for name in (*counts, *(["max_states"] if self.max_states is not None else [])):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")
        if self.first_seed < 0 or self.bootstrap_seed < 0:
            raise ValueError(
                f"first_seed, bootstrap_seed: expected at least 0; got {self.first_seed}, {self.bootstrap_seed}"
            )
        if self.noise_level is not None and (self.mode == "mean" or not 0.0 < self.noise_level < math.inf):
            raise ValueError(
                f'noise_level: expected a positive number, with --mode sample ("mean" adds no noise); got '
                f"{self.noise_level} with --mode {self.mode}"
            )
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(f"confidence: expected a number between 0 and 1; got {self.confidence}")


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve mismatch`: exit status 1 when the successes were too few or a call failed, 130 when interrupted."""
    config = parse_command(MismatchConfig, argv, "worldserve mismatch", __doc__ or SUMMARY)
    return resumable("mismatch", lambda: run(config))


def run(config: MismatchConfig) -> int:
    """Measure, write `result.json` and print it. Whatever can be refused is, before an episode is run."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from worldserve.client import EnvironmentClient
    from worldserve.episodes import InitialStateSet

    torch.set_num_threads(config.threads)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same orderly end as Ctrl-C
    states = InitialStateSet.load(config.initial_states)
    ids = states.ids[: config.max_states]
    started, cpu = time.perf_counter(), time.process_time()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        ExitStack() as stack,
        EnvironmentClient(config.target) as client,
        EnvironmentClient(config.reference) as reference,
    ):
        contract, truth = client.get_contract(), reference.get_contract()
        source = check_contracts(contract, config.target, truth, config.reference)
        checkpoints = load_checkpoints(config, contract)
        settings = settings_of(config, states.sha256, checkpoints, contract, truth)
        _refuse_another_measure(config.out)
        stack.enter_context(EVALUATION.claim(config.out, settings, config.fresh))
        write_run(config.out, "worldserve mismatch", config.target, contract, {
            **{checkpoint.name: dict(checkpoint.facts) for checkpoint in checkpoints},
            "initial_states": {"path": str(config.initial_states), "sha256": states.sha256},
            "reference": {"address": config.reference, "kind": truth.provenance.kind, **contract_fingerprints(truth)},
        })  # fmt: skip
        print(f"initial states: {config.initial_states} ({states.purpose}, {len(ids)} states)", file=sys.stderr)
        passes = range(config.first_seed, config.first_seed + math.ceil(config.max_episodes / len(ids)))
        plans = evaluation_plans(ids, passes, unique_run_name("mismatch"))[: config.max_episodes]
        # The same weights do the same from the same seeds: run once, compared with themselves.
        distinct = checkpoints[:1] if _same_weights(checkpoints) else checkpoints
        with Progress(*columns, console=Console(stderr=True)) as bars:
            tasks = {item.name: bars.add_task(item.name, total=config.successes) for item in distinct}
            rows = measure(client, reference, distinct, plans, config.successes, source, settings, config.out,
                           lambda name, episodes, count: bars.update(
                               tasks[name], completed=count,
                               description=f"{name}: replayed successes of {episodes} episodes"))  # fmt: skip
    if len(distinct) < len(checkpoints):
        rows += [{**row, "checkpoint": "baseline"} for row in rows]
    result = summarise(rows, len(checkpoints) == 2, config.replay_failures, config.confidence, config.bootstrap_seed)
    fewest = min(result[checkpoint.name]["replayed"] for checkpoint in checkpoints)
    result |= {
        "successes_wanted": config.successes,
        "successes_reached": fewest >= config.successes,
        "initial_states": {"path": str(config.initial_states), "purpose": states.purpose, "sha256": states.sha256},
        "identity": identity_of(contract, truth, checkpoints),
        "settings": dataclasses.asdict(config),
        "trainer_cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - started,
    }
    write_json(config.out / "result.json", result)
    _show(result)
    if fewest < config.successes:
        print(
            f"worldserve mismatch: successes: expected {config.successes} replayed successes of every checkpoint; got "
            f"{fewest} in {config.max_episodes} episodes. The same command with a larger --max-episodes goes on.",
            file=sys.stderr,
        )
    return int(fewest < config.successes)


def check_contracts(contract: Contract, target: str, truth: Contract, reference: str) -> RewardSource:
    """Who judges in the target: "verdict", or "success" in a simulator without a reward server (a control).

    Raises ValueError where the target does not judge, the reference knows no truth, or both cannot be compared.
    """
    simulated = contract.provenance.kind == "simulator" and judge_of(contract) != "reward_model"
    source: RewardSource = "success" if simulated else "verdict"
    check_reward_source(contract, target, source)
    if truth.provenance.kind != "simulator":
        raise ValueError(
            f"reference: expected a simulator, which knows the true success; {reference} is a "
            f"{truth.provenance.kind}. Name another --reference."
        )
    found = differences(truth.interface, contract.interface)
    if found:
        listed = "; ".join(str(item) for item in found[:5])
        raise ValueError(
            f"target: expected the interface of the reference {reference}; {target} differs in {len(found)} fields: "
            f"{listed}. The same actions would mean something else there."
        )
    judges = [part.provenance.facts.get("reward_provenance", "") for part in (contract, truth)]
    if all(judges) and judges[0] != judges[1]:
        raise ValueError(
            f"reference: expected the reward model of the target, {judges[0]}; {reference} is judged by {judges[1]}. "
            "Start both with the same --reward."
        )
    return source


def load_checkpoints(config: MismatchConfig, contract: Contract) -> list[Checkpoint]:
    """The policy and, where one is named, the baseline; raises where one is of another interface than the target."""
    checkpoints = []
    for name, directory in (("policy", config.policy), ("baseline", config.baseline)):
        if directory is None:
            continue
        source = find_policy(directory)
        policy = load_policy(source)
        check_policy_interface(policy, directory, contract, config.target)
        if config.noise_level is not None:
            policy.config = policy.config.replace(noise_level=config.noise_level)
        checkpoints.append(Checkpoint(name, policy, policy_facts(source)))
    return checkpoints


def _same_weights(checkpoints: Sequence[Checkpoint]) -> bool:
    hashes = {(item.facts["model_sha256"], item.facts["config_sha256"]) for item in checkpoints}
    return len(checkpoints) == 2 and len(hashes) == 1


def settings_of(
    config: MismatchConfig, states_sha256: str, checkpoints: Sequence[Checkpoint], contract: Contract, truth: Contract
) -> dict[str, Any]:
    """Everything the rows depend on; how many of them are wanted does not belong to it."""
    hashes = {
        f"{item.name}_{key}": item.facts[key] for item in checkpoints for key in ("model_sha256", "config_sha256")
    }
    return {
        "measure": "mismatch",
        **hashes,
        "initial_states_sha256": states_sha256,
        "max_states": config.max_states,
        "first_seed": config.first_seed,
        "mode": config.mode,
        "noise_level": config.noise_level,
        "replay_failures": config.replay_failures,
        "batch": config.batch,
        "policy_batch": config.policy_batch,
        **contract_fingerprints(contract),
        "reference_provenance": contract_fingerprints(truth)["provenance"],
    }


def _refuse_another_measure(directory: Path) -> None:
    """A mismatch is an evaluation of its own kind."""
    path = directory / EVALUATION.settings_file
    if path.exists() and read_json(path).get("measure") != "mismatch":
        raise ValueError(f"out: expected a new directory or that of a mismatch; {directory} holds another measure's.")


def identity_of(contract: Contract, truth: Contract, checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    """What was measured, for `worldserve admit`."""
    hashes = {item.name: item.facts["model_sha256"] for item in checkpoints}
    return {
        **target_identity(contract),
        "reference_provenance": contract_fingerprints(truth)["provenance"],
        "policy_model_sha256": hashes["policy"],
        "baseline_model_sha256": hashes.get("baseline"),
    }


def _show(result: Mapping[str, Any]) -> None:
    for name in ("policy", "baseline"):
        part = result[name]
        if part is None:
            continue
        print(f"{name} mismatch {_text(part['mismatch'])}: {part['failed']} of {part['replayed']} replayed successes "
              f"fail; judged successful {_text(part['judged_successful'])} of {part['episodes']} episodes")  # fmt: skip
        if part["failed_read_as_success"] is not None and part["failed"]:
            print(f"  of the {part['failed']}, the reward reads {part['failed_read_as_success']} as success there too")
        if "missed_success" in part:
            print(f"  missed success {_text(part['missed_success'])} of replayed failures")
    if result["excess"] is not None:
        print(f"excess mismatch {_text(result['excess'], '+')}")


def _text(found: Mapping[str, Any] | None, sign: str = "") -> str:
    if found is None:
        return "unknown (none replayed)"
    value, low, high = (format(found[name], f"{sign}.3f") for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}] ({found['confidence']:.0%})"
