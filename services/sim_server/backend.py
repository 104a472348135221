"""The tabletop simulator as a `Backend`: sealed initial states in, frames and ground truth out."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence

from services.sim_server.contract import tabletop_contract
from services.sim_server.pool import WorkerPool
from services.sim_server.worker import Done, Failed, RunChunk
from worldserve.contract import Contract
from worldserve.episodes import all_initial_states
from worldserve.messages import BackendChunk, BackendStep, ItemError, ResetItem, ResetReply
from worldserve.serving import errors

_log = logging.getLogger("worldserve.sim")


class TabletopBackend:
    """Scenes in worker processes; an episode's seed has no effect.

    Args:
        workers: processes, about one a core.
        initial_states: directory of the sealed sets (`train`, `validation`, `test` below it).
        camera: "default" or "robotwin".
        reward_fingerprint: provenance fingerprint of the attached reward server; "" when ground truth is the reward.
    """

    def __init__(
        self,
        workers: int,
        initial_states: str | os.PathLike[str],
        camera: str = "default",
        reward_fingerprint: str = "",
    ) -> None:
        self._states = all_initial_states(initial_states)
        judge = "reward_model" if reward_fingerprint else "ground_truth"
        self._contract = tabletop_contract(camera, judge, reward_fingerprint)
        self._pool = WorkerPool(workers, camera)

    @property
    def contract(self) -> Contract:
        """The contract."""
        return self._contract

    @property
    def capacity(self) -> int:
        """Scenes that fit."""
        return self._pool.capacity

    @property
    def pool(self) -> WorkerPool:
        """The processes, for tests that kill and for metrics."""
        return self._pool

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        """Builds a fresh scene for each item."""
        known = {item.episode_id: item for item in items if item.initial_state_id in self._states}
        outcomes = self._pool.open({name: self._states[item.initial_state_id].scene for name, item in known.items()})
        failed = [name for name, outcome in outcomes.items() if isinstance(outcome, Failed)]
        self._pool.close(failed)
        return [self._opened(item, outcomes.get(item.episode_id)) for item in items]

    def _opened(self, item: ResetItem, outcome: Done | Failed | None) -> ResetReply | ItemError:
        if outcome is None:
            known = f"one of {len(self._states)} ids such as {next(iter(self._states))!r}"
            return errors.initial_state_unknown("initial_state_id", item.initial_state_id, known)
        if isinstance(outcome, Failed):
            return _fault("reset", outcome)
        state = self._states[item.initial_state_id]
        return ResetReply(
            item.episode_id,
            item.initial_state_id,
            item.seed,
            outcome.frames[0],
            outcome.proprioception,
            state.instruction,
        )

    def step(self, items: Sequence[BackendStep]) -> list[BackendChunk | ItemError]:
        """Runs a chunk in each scene, workers side by side."""
        chunks = {
            item.episode_id: RunChunk(
                item.episode_id, item.actions, tuple(index - item.first_action_index for index in item.frame_indices)
            )
            for item in items
        }
        outcomes = self._pool.step(chunks)
        results: list[BackendChunk | ItemError] = []
        for item in items:
            outcome = outcomes[item.episode_id]
            if isinstance(outcome, Failed):
                results.append(_fault("step", outcome))
            else:
                results.append(BackendChunk(outcome.frames, outcome.success))
        return results

    def close_episodes(self, episode_ids: Sequence[str]) -> None:
        """Frees scenes."""
        self._pool.close(episode_ids)

    def shutdown(self) -> None:
        """Ends the workers."""
        self._pool.shutdown()


def _fault(what: str, outcome: Failed) -> ItemError:
    reference = uuid.uuid4().hex[:12]
    _log.error("%s failed [%s]\n%s", what, reference, outcome.text)
    return errors.internal(what, reference)
