"""`worldserve dpo`: reads recorded episodes, trains, shows progress."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from typing import Any

import torch

from services.trainer.dpo import train
from services.trainer.dpo_config import DPOConfig
from services.trainer.policies import FlowPolicy, find_policy, load_policy
from services.trainer.preferences import RecordedDecisions, read_episodes, read_store
from services.trainer.recipes import parse_command
from services.trainer.run_facts import policy_facts
from services.trainer.run_record import RunRecord, write_json
from services.trainer.training_command import TrainingProgress, exit_status, jsonable

SUMMARY = "Improve a policy by DPO on recorded episodes: no simulator, no world model."
DESCRIPTION = """Improves a flow policy by direct preference optimisation: of two recorded episodes from one initial
state, the successful one is preferred. Needs several episodes a state, some of which failed.

examples:
  worldserve collect --target localhost:50051 --episodes 1200 --episodes-per-state 4 --out runs/rollouts
  worldserve dpo --data runs/rollouts --policy weights/policy-sft --out runs/dpo
  worldserve dpo --data runs/rollouts runs/more --outcome verdict --unit decision --out runs/dpo-verdict
  worldserve dpo --store runs/store --out runs/dpo-store
  worldserve dpo --data runs/rollouts --policy weights/policy-sft --out runs/dpo --resume
"""


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve dpo`."""
    config = parse_command(DPOConfig, argv, "worldserve dpo", DESCRIPTION)
    return exit_status("dpo", config.out, lambda: run(config))


def run(config: DPOConfig) -> int:
    """Read, train, report; returns the exit status. Ctrl-C and SIGTERM leave whole checkpoints."""
    from rich.console import Console

    console = Console(stderr=True)
    torch.set_num_threads(config.threads)
    source = find_policy(config.policy)
    policy = load_policy(source)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    facts = policy_facts(source)
    card = {"command": "worldserve dpo", "started_from": str(config.policy), "config": jsonable(config)}
    with TrainingProgress(console) as progress:
        data = load(config, policy, progress)
        inputs = {"policy": facts, "episodes": list(data.episode_ids)}
        settings = dataclasses.asdict(config)
        record = RunRecord(config.out, settings, config.resume, {"out", "threads", "epochs"})
        try:
            write_json(config.out / "inputs.json", inputs)
            train(policy, data, config, record, progress, card | {"policy": facts})
        finally:
            record.close()
    console.print(f"policy: {config.out / 'policy'}   metrics: {config.out / 'metrics.jsonl'}")
    return 0


def load(config: DPOConfig, policy: FlowPolicy, progress: Any) -> RecordedDecisions:
    """The episodes that can be paired, of all sources. Raises ValueError where there is none."""
    if not (config.data or config.store):
        raise ValueError("data: expected directories of recorded episodes, or --store; got neither")
    interface, chunk = policy.config.interface_fingerprint, policy.config.chunk_actions
    parts: list[RecordedDecisions | None] = []
    if config.data:

        def decoded(done: int, total: int) -> None:
            progress("rollout", 0 if done == 1 else 1, total if done == 1 else 0)

        parts.append(read_episodes(config.data, config.outcome, chunk, interface, decoded))
    if config.store:
        parts.append(read_store(config.store, config.outcome, interface))
    found = [part for part in parts if part is not None]
    if not found:
        raise ValueError(
            f"data: expected an initial state with both a success and a failure (by {config.outcome}); got none. "
            "Record several episodes a state: `worldserve collect --episodes-per-state 4`."
        )
    return RecordedDecisions.join(found)
