"""Rollouts of a policy in a target, recorded with every frame: `worldserve collect`.

    worldserve collect --target 127.0.0.1:50051 --policy weights/policy-sft --episodes 600 --out runs/rollouts

The records are what rewards and world models learn from: policy rollouts hold the failures that matter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.trainer.rollout import EpisodePlan, EpisodeRecord, RewardSource, collect_rollout, plan_episodes
from worldserve.contract import Contract
from worldserve.episodes import Episode, EpisodeReader, EpisodeWriter, InitialStateSet, refuse_for_training

SUMMARY = "Record rollouts of a policy in a simulator or a world model."


@dataclass(frozen=True)
class CollectConfig:
    """Rollouts of a policy, recorded with every frame."""

    policy: Path = Path("weights/policy-sft")
    """Directory of the policy."""
    out: Path = Path("runs/rollouts")
    """Directory of the data set; an interrupted collection goes on there."""
    target: str = "127.0.0.1:50051"
    """HOST:PORT of a simulator or a world model."""
    episodes: int = 100
    """How many episodes the data set shall hold in the end."""
    initial_states: Path = Path("initial_states/train")
    """Sealed set of initial states, taken in order and again from the start; test states are refused."""
    first_state: int = 0
    """Position in the set of the first episode's state."""
    mode: Literal["mean", "sample"] = "sample"
    """"sample" explores as training does, "mean" acts as evaluation does."""
    noise_level: float | None = None
    """Flow-SDE noise level with "sample" (none: the policy's own)."""
    seed: int = 0
    """Of the policy's and the world model's noise; episode i draws from (seed, i)."""
    batch: int = 32
    """Episodes open at once; each holds all its frames (7 MB at 96x128) in memory."""
    threads: int = 1
    """CPU threads of torch."""

    def __post_init__(self) -> None:
        if min(self.episodes, self.batch, self.threads) < 1 or self.first_state < 0:
            raise ValueError(
                "episodes, batch, threads: expected at least 1, first_state at least 0; "
                f"got {self.episodes}, {self.batch}, {self.threads}, {self.first_state}"
            )


def to_episode(record: EpisodeRecord, contract: Contract, policy_name: str, policy_sha256: str) -> Episode:
    """A finished rollout as the store keeps it."""
    import numpy as np

    last = record.replies[-1]
    return Episode(
        episode_id=record.plan.episode_id,
        initial_state_id=record.plan.initial_state_id,
        seed=record.plan.environment_seed,
        instruction=record.instruction,
        requested_actions=record.requested_actions,
        executed_actions=record.executed_actions,
        proprioception=record.proprioception,
        rewards=np.concatenate([reply.rewards for reply in record.replies]),
        success=last.success,
        verdict=last.verdict,
        end_reason=last.end_reason,
        terminated=last.terminated,
        truncated=last.truncated,
        clipped_count=sum(reply.clipped_count for reply in record.replies),
        policy_name=policy_name,
        policy_sha256=policy_sha256,
        contract=contract,
        metadata={"success_after_chunk": [reply.success for reply in record.replies]},
        frame_source=record.frames,
    )


def missing_plans(config: CollectConfig, ids: Sequence[str]) -> list[EpisodePlan]:
    """The episodes that the data set does not hold yet; each is defined by its number alone."""
    states = [ids[(config.first_state + index) % len(ids)] for index in range(config.episodes)]
    plans = plan_episodes(states, config.seed, 0, f"{config.out.name}-{config.mode}-{config.seed}")
    if not (config.out / "meta" / "info.json").exists():
        return plans
    there = {info.episode_id for info in EpisodeReader(config.out).infos}
    return [plan for plan in plans if plan.episode_id not in there]


def run(config: CollectConfig) -> tuple[int, int, int]:
    """Collects what is missing; returns how many were added, how many there are, and how many succeeded."""
    import dataclasses

    import torch
    from rich.progress import Progress

    from services.trainer.policies import load_policy
    from worldserve.client import EnvironmentClient
    from worldserve.files import file_sha256

    torch.set_num_threads(config.threads)
    ids = InitialStateSet.load(config.initial_states).ids
    refuse_for_training(ids)
    policy = load_policy(config.policy)
    if config.noise_level is not None:
        policy.config = dataclasses.replace(policy.config, noise_level=config.noise_level)
    digest = file_sha256(config.policy / "model.safetensors")
    plans = missing_plans(config, ids)
    with EnvironmentClient(config.target) as client, EpisodeWriter(config.out) as writer, Progress() as bar:
        contract = client.get_contract()
        knows_truth = contract.provenance.kind == "simulator"
        source: RewardSource = "success" if knows_truth else "verdict"
        task = bar.add_task("episodes", total=len(plans))

        def keep(record: EpisodeRecord) -> None:
            writer.append(to_episode(record, contract, config.policy.name, digest))
            bar.advance(task)

        for first in range(0, len(plans), config.batch):
            part = plans[first : first + config.batch]
            collect_rollout(
                client, policy, [], config.seed, source, config.mode, config.batch, plans=part, on_episode=keep
            )
    infos = EpisodeReader(config.out).infos
    return len(plans), len(infos), sum(bool(info.success) for info in infos)


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve collect`."""
    from services.trainer.recipes import parse_command

    config = parse_command(CollectConfig, argv, "worldserve collect", __doc__ or SUMMARY)
    try:
        added, total, successes = run(config)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"worldserve collect: {error}", file=sys.stderr)
        return 1
    print(f"{config.out}: {added} episodes added, {total} in all, {successes} successes")
    return 0
