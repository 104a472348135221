"""Closed loop: a policy acts in a target, and the actions it executed run again in a reference from the same state.

Rounds of episodes, resumable through a file of rows, until there are enough replayed successes. The figures made of the
rows are in `mismatch_statistics`, the command in `mismatch`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from services.trainer.calls import call_again
from services.trainer.mismatch_statistics import replayed_successes
from services.trainer.plans import EpisodePlan
from services.trainer.rollout import Client, Policy, RewardSource, collect_rollout
from services.trainer.run_record import append_jsonl, read_jsonl
from worldserve.messages import ItemError, ReplayItem, ReplayOutcome, ResetItem, ResetReply, StepItem, StepReply


class Reference(Protocol):
    """What a replay needs of `worldserve.client.EnvironmentClient`."""

    def replay(self, items: Sequence[ReplayItem]) -> Iterator[tuple[str, ReplayOutcome | ItemError]]:
        """Run recorded episodes; yields (episode_id, outcome)."""


@dataclass(frozen=True)
class Checkpoint:
    """A policy that is measured: `name` "policy" or "baseline", where it lies, its hashes (`policy_facts`)."""

    name: str
    policy: Policy
    facts: Mapping[str, str]


class ExecutedActions:
    """A client that keeps the executed actions of the episodes that pass through it, without their frames."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._chunks: dict[str, dict[int, NDArray[np.float32]]] = {}

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        """As the client."""
        return self._client.reset(items)

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        """As the client; the executed actions of every committed chunk are kept."""
        replies = self._client.step(items)
        for reply in replies:
            if not isinstance(reply, ItemError):
                chunks = self._chunks.setdefault(reply.episode_id, {})
                chunks[reply.committed_chunk_index] = reply.executed_actions
        return replies

    def close_episodes(self, episode_ids: Sequence[str]) -> Any:
        """As the client; the actions stay."""
        return self._client.close_episodes(episode_ids)

    def of(self, episode_id: str) -> NDArray[np.float32]:
        """float32 (actions, dimensions) of a whole episode."""
        chunks = self._chunks[episode_id]
        return np.concatenate([chunks[index] for index in sorted(chunks)]).astype(np.float32, copy=False)


def run_round(
    client: Client,
    reference: Reference,
    checkpoint: Checkpoint,
    plans: Sequence[EpisodePlan],
    source: RewardSource,
    settings: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], list[str]]:
    """One episode a plan in `client`, and the replays of those judged successful (with replay_failures: of all).

    Args:
        source: who judges in the target, "verdict" or "success".
        settings: mode, policy_batch and replay_failures.

    Returns:
        A row an episode that was run (and replayed where it had to be), and a line an episode that was not.
    """
    recorder = ExecutedActions(client)
    rollout = collect_rollout(
        recorder,
        checkpoint.policy,
        [],
        0,
        source,
        settings["mode"],
        len(plans),
        policy_batch=settings["policy_batch"],
        plans=list(plans),
    )
    judged = rollout.verdict if source == "verdict" else rollout.success
    items = [
        ReplayItem(plan.episode_id, plan.initial_state_id, plan.environment_seed, recorder.of(plan.episode_id))
        for plan, success in zip(rollout.plans, judged, strict=True)
        if success or settings["replay_failures"]
    ]
    outcomes = replay_all(reference, items)
    missing = [f"{f.plan.initial_state_id} in the target: {f.error}" for f in rollout.failures]
    rows = []
    for number, plan in enumerate(rollout.plans):
        outcome = outcomes.get(plan.episode_id)
        if isinstance(outcome, ItemError):
            missing.append(f"{plan.initial_state_id} in the reference: {outcome}")
            continue
        rows.append(
            {
                "checkpoint": checkpoint.name,
                "initial_state_id": plan.initial_state_id,
                "evaluation_seed": plan.entropy[0],
                "environment_seed": plan.environment_seed,
                "judged": int(judged[number]),
                "verdict_peak": float(rollout.verdict_peak[number]),
                "clipped_actions": int(rollout.clipped_actions[number]),
                "executed_actions_sha256": hashlib.sha256(recorder.of(plan.episode_id).tobytes()).hexdigest(),
                **_replayed(outcome),
            }
        )
    return rows, missing


def _replayed(outcome: ReplayOutcome | None) -> dict[str, Any]:
    """The reference's part of a row: -1 where it was not asked or does not judge."""
    verdict = outcome.verdict if outcome else None
    return {
        "reference_success": int(bool(outcome.success)) if outcome else -1,
        "reference_verdict": int(verdict.success) if verdict else -1,
        "reference_verdict_peak": float(verdict.peak) if verdict else None,
    }


def replay_all(reference: Reference, items: Sequence[ReplayItem]) -> dict[str, ReplayOutcome | ItemError]:
    """The outcome of every item by id; what failed for a passing reason is sent again.

    Raises RuntimeError where the reference does not know the true success, or executed other actions than it was sent:
    then it did not start from the same state, and the outcome would say nothing.
    """

    def replay(part: Sequence[ReplayItem]) -> list[ReplayOutcome | ItemError]:
        found = dict(reference.replay(part))
        return [found[item.episode_id] for item in part]

    outcomes = call_again(replay, items) if items else []
    for item, outcome in zip(items, outcomes):
        if isinstance(outcome, ItemError):
            continue
        if outcome.success is None:
            raise RuntimeError(
                f"reference: expected one that knows the true success, as a simulator does; it gave none for "
                f"{item.initial_state_id}. Name a simulator as --reference."
            )
        if outcome.clipped_count or outcome.elapsed_steps != len(item.actions):
            raise RuntimeError(
                f"reference: expected the {len(item.actions)} executed actions of {item.initial_state_id} to run "
                f"unchanged; {outcome.clipped_count} numbers were clipped and {outcome.elapsed_steps} actions ran. Do "
                "target and reference know the same initial states? `worldserve contract diff` compares the rest."
            )
    return {item.episode_id: outcome for item, outcome in zip(items, outcomes)}


def measure(
    client: Client,
    reference: Reference,
    checkpoints: Sequence[Checkpoint],
    plans: Sequence[EpisodePlan],
    successes: int,
    source: RewardSource,
    settings: Mapping[str, Any],
    directory: Path,
    on_progress: Callable[[str, int, int], None] = lambda name, episodes, successes: None,
) -> list[dict[str, Any]]:
    """Rounds of `settings["batch"]` plans, each by every checkpoint, until all have enough replayed successes.

    What `directory`/episodes.jsonl holds is not run again. Every checkpoint has run the same plans in the end.
    `on_progress` gets a checkpoint's name, its episodes and its replayed successes so far.
    Raises RuntimeError when episodes could not be finished; the rows of all others are kept.
    """
    path = directory / "episodes.jsonl"
    done = {(row["checkpoint"], row["initial_state_id"], row["evaluation_seed"]): row for row in read_jsonl(path)}
    used: list[dict[str, Any]] = []
    missing: list[str] = []
    for first in range(0, len(plans), settings["batch"]):
        part = plans[first : first + settings["batch"]]
        for checkpoint in checkpoints:
            keys = {plan: (checkpoint.name, plan.initial_state_id, plan.entropy[0]) for plan in part}
            todo = [plan for plan in part if keys[plan] not in done]
            if todo:
                named = [dataclasses.replace(plan, episode_id=f"{checkpoint.name}/{plan.episode_id}") for plan in todo]
                rows, failed = run_round(client, reference, checkpoint, named, source, settings)
                append_jsonl(path, rows)
                missing += failed
                done |= {(row["checkpoint"], row["initial_state_id"], row["evaluation_seed"]): row for row in rows}
            used += [done[key] for key in keys.values() if key in done]
            own = [row for row in used if row["checkpoint"] == checkpoint.name]
            on_progress(checkpoint.name, len(own), len(replayed_successes(own)))
        if all(
            len(replayed_successes([row for row in used if row["checkpoint"] == checkpoint.name])) >= successes
            for checkpoint in checkpoints
        ):
            break
    if missing:
        raise RuntimeError(
            f"{len(missing)} episodes could not be finished; the first: {missing[0]}. Run the same command again: it "
            "goes on with these."
        )
    return used
