"""Pairs from one start: an action sequence that succeeds in the simulator and a perturbed one that fails there.

Both members are then run in a target, from the same start and with the same noise seed, and judged there. A target that
follows the actions tells them apart; one that draws what usually happens from that start calls both the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.trainer.action_runs import ActionOutcome, ActionRun, every_frame, run_actions
from services.trainer.fork_statistics import rate, summed
from services.trainer.perturbation import (
    UNITS,
    Kind,
    Perturbation,
    draw_perturbation,
    executed,
    find_grasp,
    perturbation_generator,
)
from services.trainer.rollout import Client
from worldserve.contract import Contract
from worldserve.episodes import Episode, EpisodeReader, EpisodeWriter

Row = Mapping[str, Any]
MEMBERS = ("nominal", "counterfactual")
# By (nominal read as success, counterfactual read as success) in the target.
READINGS = {
    (True, False): "both_right",
    (True, True): "both_success",
    (False, False): "both_failure",
    (False, True): "swapped",
}


@dataclass(frozen=True)
class PairSettings:
    """What pairs depend on beside the episodes."""

    kinds: tuple[Kind, ...]
    sizes: Mapping[str, tuple[float, ...]]
    """Sizes to try, by unit ("mm", "actions"), growing."""
    seed: int


@dataclass
class _Search:
    """One candidate on its way to a pair."""

    episode: Episode
    perturbation: Perturbation | None
    tried: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    found: bool = False
    reason: str = ""

    def row(self) -> dict[str, Any]:
        kind = self.perturbation.kind if self.perturbation else None
        return {
            "episode_id": self.episode.episode_id,
            "initial_state_id": self.episode.initial_state_id,
            "seed": self.episode.seed,
            "found": self.found,
            "reason": self.reason,
            "kind": kind,
            "unit": UNITS[kind] if kind else None,
            "size": self.tried[-1]["size"] if self.found else None,
            "tried": self.tried,
        }


class PairFinder:
    """Makes pairs from recorded successes: the smallest size, of a few, at which the simulator says failure."""

    def __init__(
        self, reference: Client, target: Client, contract: Contract, settings: PairSettings, batch: int
    ) -> None:
        self._reference, self._target = reference, target
        self._interface, self._settings, self._batch = contract.interface, settings, batch
        self._chunk_actions = contract.interface.timing.chunk_actions

    def rows(self, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
        """One row an episode, in order, with its readings in the target where a pair was found."""
        searches = [_Search(episode, self._perturbation(episode)) for episode in episodes]
        self._check_nominal(searches)
        steps = max(len(sizes) for sizes in self._settings.sizes.values())
        for step in range(steps):
            self._try(searches, step)
        rows = [search.row() for search in searches]
        found = [(row, search) for row, search in zip(rows, searches, strict=True) if search.found]
        runs = [run for row, search in found for run in self._members(search, row["size"])]
        outcomes = self._run(self._target, runs)
        for number, (row, _) in enumerate(found):
            pair = outcomes[2 * number : 2 * number + 2]
            row["target"] = {name: _judged(outcome) for name, outcome in zip(MEMBERS, pair, strict=True)}
        return rows

    def perturbed_by(self, row: Row) -> dict[str, Any]:
        """What a found pair's perturbation is made of: with the episode, all of its actions."""
        return {**{name: row[name] for name in ("kind", "unit", "size")}, "perturbation_seed": self._settings.seed}

    def counterfactual(self, episode: Episode, size: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(requested, executed) actions of an episode perturbed by `size`, each float32 (n, 14)."""
        perturbation = self._perturbation(episode)
        if perturbation is None:
            raise ValueError(f"episode {episode.episode_id!r}: expected a grasp; its gripper never closes")
        requested = perturbation.apply(episode.executed_actions, size)
        return requested, executed(requested, episode.proprioception[0], self._interface.action)

    def _perturbation(self, episode: Episode) -> Perturbation | None:
        grasp = find_grasp(episode.executed_actions)
        if grasp is None:
            return None
        generator = perturbation_generator(self._settings.seed, episode.episode_id)
        return draw_perturbation(episode.executed_actions, grasp, self._settings.kinds, generator)

    def _check_nominal(self, searches: Sequence[_Search]) -> None:
        runs = [ActionRun(s.episode.initial_state_id, s.episode.seed, s.episode.executed_actions) for s in searches]
        for search, outcome in zip(searches, self._run(self._reference, runs), strict=True):
            if search.perturbation is None:
                search.reason = "no grasp"
            elif not outcome.success:
                search.reason = "recorded as a success, failed when replayed"

    def _try(self, searches: Sequence[_Search], step: int) -> None:
        """Runs the step-th size of every search that goes on."""
        pending: list[tuple[_Search, float, ActionRun]] = []
        for search in searches:
            if search.found or search.reason or search.perturbation is None:
                continue
            sizes = self._settings.sizes[UNITS[search.perturbation.kind]]
            if step < len(sizes):
                pending.append((search, sizes[step], self._members(search, sizes[step])[1]))
        outcomes = self._run(self._reference, [run for *_, run in pending])
        for (search, size, _), outcome in zip(pending, outcomes, strict=True):
            search.tried.append({"size": size, "success": bool(outcome.success)})
            search.found = not outcome.success
            assert search.perturbation is not None
            if not search.found and step + 1 == len(self._settings.sizes[UNITS[search.perturbation.kind]]):
                search.reason = "no size failed"

    def _members(self, search: _Search, size: float) -> tuple[ActionRun, ActionRun]:
        episode = search.episode
        _, actions = self.counterfactual(episode, size)
        return (
            ActionRun(episode.initial_state_id, episode.seed, episode.executed_actions),
            ActionRun(episode.initial_state_id, episode.seed, actions),
        )

    def _run(self, client: Client, runs: Sequence[ActionRun]) -> list[ActionOutcome]:
        outcomes: list[ActionOutcome] = []
        for first in range(0, len(runs), self._batch):
            outcomes += run_actions(client, runs[first : first + self._batch], self._chunk_actions)
        return outcomes

    def record(self, row: Row, episode: Episode, contract: Contract) -> Iterator[Episode]:
        """Both members of a found pair, run again in the simulator with every frame.

        Raises:
            RuntimeError: when the simulator's outcomes are not those that were found.
        """
        requested, actions = self.counterfactual(episode, row["size"])
        asked = {"nominal": episode.requested_actions, "counterfactual": requested}
        runs = [
            ActionRun(episode.initial_state_id, episode.seed, member) for member in (episode.executed_actions, actions)
        ]
        outcomes = run_actions(self._reference, runs, self._chunk_actions, every_frame(self._interface))
        for member, outcome in zip(MEMBERS, outcomes, strict=True):
            if outcome.success is not (member == "nominal"):
                raise RuntimeError(
                    f"record: expected the {member} of {episode.episode_id!r} to end as it did before; the simulator "
                    f"now says success {outcome.success}. Is it the one that the pairs were found in?"
                )
            yield _recorded(row, self.perturbed_by(row), episode, member, asked[member], outcome, contract)


def member_id(row: Row, member: str) -> str:
    """The name of a pair's member in a data set of pairs."""
    return f"pairs/{row['episode_id']}/{member}"


def _judged(outcome: ActionOutcome) -> dict[str, Any]:
    if outcome.verdict is None:
        raise RuntimeError(
            "target: expected a verdict at the episode's end; got none. Start it with --reward HOST:PORT."
        )
    return {"success": outcome.verdict.success, "peak": outcome.verdict.peak}


def _recorded(
    row: Row,
    perturbed_by: Mapping[str, Any],
    episode: Episode,
    member: str,
    requested: NDArray[np.float32],
    outcome: ActionOutcome,
    contract: Contract,
) -> Episode:
    last = outcome.replies[-1]
    actions = np.concatenate([reply.executed_actions for reply in outcome.replies])
    nominal = member == "nominal"
    return Episode(
        episode_id=member_id(row, member),
        initial_state_id=episode.initial_state_id,
        seed=episode.seed,
        instruction=outcome.reset.instruction,
        requested_actions=requested,
        executed_actions=actions,
        proprioception=np.concatenate([outcome.reset.proprioception[None], actions]),
        rewards=np.concatenate([reply.rewards for reply in outcome.replies]),
        success=last.success,
        verdict=last.verdict,
        end_reason=last.end_reason,
        terminated=last.terminated,
        truncated=last.truncated,
        clipped_count=int(np.count_nonzero(actions != requested)),
        policy_name=episode.policy_name if nominal else f"{episode.policy_name}, perturbed",
        policy_sha256=episode.policy_sha256 if nominal else "",
        contract=contract,
        metadata={
            "pair": row["episode_id"],
            "member": member,
            **perturbed_by,
        },
        frame_source=outcome.frames,
    )


def record_pairs(
    finder: PairFinder,
    rows: Sequence[Row],
    reader: EpisodeReader,
    contract: Contract,
    directory: Path,
    on_progress: Callable[[], None] = lambda: None,
) -> int:
    """Adds the members of found pairs that `directory` does not hold yet; returns how many it added.

    Raises:
        ValueError: when it holds a pair of an episode that was perturbed otherwise.
    """
    added = 0
    with EpisodeWriter(directory) as writer:
        there = {info.episode_id: info.metadata for info in EpisodeReader(directory).infos}
        for row in rows:
            for member in MEMBERS:
                known = there.get(member_id(row, member))
                asked = finder.perturbed_by(row)
                if known is not None and any(known.get(name) != value for name, value in asked.items()):
                    raise ValueError(
                        f"record: {directory} holds {member_id(row, member)!r}, perturbed otherwise (expected {asked}; "
                        f"got {dict(known)}). Choose another --record."
                    )
            if not all(member_id(row, member) in writer for member in MEMBERS):
                for episode in finder.record(row, reader.by_id(row["episode_id"]), contract):
                    if episode.episode_id not in writer:
                        writer.append(episode)
                        added += 1
            on_progress()
    return added


def pair_candidates(rows: Sequence[Row], seed: int) -> list[str]:
    """Episode ids in the order in which they are tried: one of each initial state, then a second of each, and so on.

    States and episodes are shuffled by hashes of (seed, id): the first n are the same whatever follows.
    """
    states: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: _hash(seed, row["episode_id"])):
        states.setdefault(row["initial_state_id"], []).append(row["episode_id"])
    ordered = [states[state] for state in sorted(states, key=lambda state: _hash(seed, state))]
    longest = max(map(len, ordered), default=0)
    return [ids[number] for number in range(longest) for ids in ordered if number < len(ids)]


def shuffled(rows: Sequence[Row], seed: int) -> list[Row]:
    """Rows in the order of hashes of (seed, episode id): every first n of them are a fair sample, and stay in it."""
    return sorted(rows, key=lambda row: _hash(seed, row["episode_id"]))


def _hash(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed}/{name}".encode()).hexdigest()


def summarise_pairs(rows: Sequence[Row], confidence: float, seed: int) -> dict[str, Any]:
    """Shares of the four readings over all found pairs, and by kind and size; intervals over initial states."""
    found = [row for row in rows if row["found"]]
    sizes = sorted({(row["kind"], row["size"], row["unit"]) for row in found})
    reasons = sorted({row["reason"] for row in rows if not row["found"]})
    return {
        **_shares(found, confidence, seed),
        "candidates": len(rows),
        "not_found": {reason: sum(row["reason"] == reason for row in rows) for reason in reasons},
        "by_size": {
            f"{kind} {size:g} {unit}": _shares(
                [row for row in found if (row["kind"], row["size"]) == (kind, size)], confidence, seed
            )
            for kind, size, unit in sizes
        },
    }


def reading_of(row: Row) -> str:
    """How the target read a pair: "both_right", "both_success", "both_failure" or "swapped"."""
    nominal, counterfactual = (bool(row["target"][member]["success"]) for member in MEMBERS)
    return READINGS[nominal, counterfactual]


def _shares(rows: Sequence[Row], confidence: float, seed: int) -> dict[str, Any]:
    shares: dict[str, Any] = {}
    for reading in READINGS.values():
        counts = summed((row["initial_state_id"], reading_of(row) == reading, 1) for row in rows)
        shares[reading] = rate(counts, confidence, seed)
    return {"count": len(rows), **shares}
