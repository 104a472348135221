"""Plans of episodes: which state, which randomness, and the name on the wire."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class EpisodePlan:
    """One episode to run. `index` is its number in the iteration; all randomness is derived from `entropy`.

    A keyframe start replays `prefix_chunks`, float32 (chunks, actions, dimensions), before the policy decides anything.
    """

    index: int
    episode_id: str
    initial_state_id: str
    entropy: tuple[int, ...]
    prefix_chunks: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)

    @property
    def prefix_length(self) -> int:
        """Decisions that are replayed."""
        return 0 if self.prefix_chunks is None else len(self.prefix_chunks)

    def policy_generator(self) -> torch.Generator:
        """A fresh generator of the policy's noise."""
        return torch.Generator().manual_seed(_derive(self.entropy, 0))

    def final_generator(self) -> torch.Generator:
        """A fresh generator of the policy's noise after the last decision, for a value that depends on noise."""
        return torch.Generator().manual_seed(_derive(self.entropy, 2))

    @property
    def environment_seed(self) -> int:
        """Seed of the world model's noise, below 2**63."""
        return _derive(self.entropy, 1)


def _derive(entropy: tuple[int, ...], stream: int) -> int:
    sequence = np.random.SeedSequence(entropy=entropy, spawn_key=(stream,))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def unique_run_name(job: str) -> str:
    """A prefix of episode ids that no other run uses, so that what a killed run left open on a server is never met."""
    return f"{job}-{uuid.uuid4().hex[:12]}"


def plan_episodes(initial_state_ids: Sequence[str], seed: int, iteration: int, run_name: str) -> list[EpisodePlan]:
    """One plan a state id, in order. `run_name` keeps the episode ids of different runs apart on one server."""
    return [
        EpisodePlan(index, f"{run_name}/{iteration}/{index}", state, (seed, iteration, index))
        for index, state in enumerate(initial_state_ids)
    ]
