"""Finished episodes of one rollout as arrays, row by row: what trainers learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.trainer.plans import EpisodePlan
from services.trainer.policies import PolicyObservation, PolicySample
from worldserve.messages import ItemError


@dataclass(frozen=True)
class EpisodeFailure:
    """An episode that could not be finished, and why."""

    plan: EpisodePlan
    chunk_index: int
    error: ItemError


@dataclass
class Rollout:
    """N finished episodes of T decisions, and those that failed.

    images uint8 (N, T, H, W, 3) and states float32 (N, T, 14) are what the policy saw; `final_images`, `final_states`
    what it would have seen next. `samples` holds the policy's tensors by field name, each (N, T, ...);
    executed_actions float32 (N, T, actions, 14) is what the target ran. rewards float32, terminated, truncated (N, T).
    success, verdict int8 (N,): 1, 0, or -1 where the target does not say. acted bool (N, T): False for decisions that
    were replayed from a keyframe's recording; their samples are no draws of the policy. first_success int64 (N,): the
    decision during which the rewarded success came about, T for none.
    """

    plans: list[EpisodePlan]
    instructions: list[str]
    images: NDArray[np.uint8]
    states: NDArray[np.float32]
    final_images: NDArray[np.uint8]
    final_states: NDArray[np.float32]
    samples: dict[str, torch.Tensor]
    executed_actions: NDArray[np.float32]
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: NDArray[np.int8]
    verdict: NDArray[np.int8]
    verdict_peak: NDArray[np.float32]
    clipped_actions: NDArray[np.int64]
    acted: NDArray[np.bool_]
    first_success: NDArray[np.int64]
    failures: list[EpisodeFailure]
    policy_cpu_s: float
    wall_s: float

    @property
    def values(self) -> torch.Tensor:
        """The critic's values at rollout, float32 (N, T)."""
        return self.samples["values"]

    def __len__(self) -> int:
        return len(self.plans)

    def acted_rows(self) -> NDArray[np.int64]:
        """Flat numbers (episode * T + decision) of the policy's own decisions."""
        return np.flatnonzero(self.acted)

    def select(self, episodes: Sequence[int]) -> Rollout:
        """The episodes at these positions, in that order; failures and costs stay the whole rollout's."""
        at = np.asarray(episodes, np.int64)
        chosen: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                chosen[field.name] = value[at]
            elif field.name in ("plans", "instructions"):
                chosen[field.name] = [value[position] for position in at]
        samples = {name: value[torch.from_numpy(at)] for name, value in self.samples.items()}
        return replace(self, samples=samples, **chosen)

    @staticmethod
    def join(parts: Sequence[Rollout]) -> Rollout:
        """Rollouts one after the other; failures are listed, costs added."""
        joined: dict[str, Any] = {}
        for field in fields(Rollout):
            values = [getattr(part, field.name) for part in parts]
            if isinstance(values[0], np.ndarray):
                joined[field.name] = np.concatenate(values)
            elif isinstance(values[0], list):
                joined[field.name] = [item for value in values for item in value]
            elif isinstance(values[0], float):
                joined[field.name] = sum(values)
        samples = {name: torch.cat([part.samples[name] for part in parts]) for name in parts[0].samples}
        return Rollout(samples=samples, **joined)

    def observation(self, rows: NDArray[np.int64]) -> PolicyObservation:
        """Observations of flat decisions `rows` (episode * T + decision)."""
        horizon = self.rewards.shape[1]
        flat_images = self.images.reshape(-1, *self.images.shape[2:])
        flat_states = self.states.reshape(-1, self.states.shape[-1])
        return make_observation(
            flat_images[rows], flat_states[rows], [self.instructions[int(row) // horizon] for row in rows]
        )

    def sample(self, rows: NDArray[np.int64]) -> PolicySample:
        """The policy's samples of flat decisions `rows`."""
        index = torch.from_numpy(rows)
        return PolicySample(**{name: value.flatten(0, 1)[index] for name, value in self.samples.items()})


def make_observation(
    images: NDArray[np.uint8], states: NDArray[np.float32], instructions: list[str]
) -> PolicyObservation:
    """Numpy rows as the policy takes them."""
    return PolicyObservation(
        images=torch.from_numpy(np.ascontiguousarray(images)),
        state=torch.from_numpy(np.ascontiguousarray(states, dtype=np.float32)),
        instructions=instructions,
    )
