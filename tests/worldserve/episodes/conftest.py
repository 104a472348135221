"""Small episodes to write and read."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from worldserve.contract import adjust_bottle
from worldserve.episodes import Episode
from worldserve.messages import Verdict

MakeEpisode = Callable[..., Episode]
CONTRACT = adjust_bottle("simulator", "tabletop", {"renderer": "test"})


@pytest.fixture
def make_episode() -> MakeEpisode:
    """Makes an episode of 7 actions and 8 frames of noise, the hardest case for a codec; any field can be given."""

    def make(number: int = 0, **changes: Any) -> Episode:
        random = np.random.default_rng(number)
        executed = random.normal(size=(7, 14)).astype(np.float32)
        values: dict[str, Any] = {
            "episode_id": f"episode-{number}",
            "initial_state_id": f"adjust_bottle/train/{number:04d}",
            "seed": number,
            "instruction": f"Pick up bottle {number % 2}.",
            "requested_actions": executed + np.float32(1.5),
            "executed_actions": executed,
            "proprioception": random.normal(size=(8, 14)).astype(np.float32),
            "rewards": random.normal(size=7).astype(np.float32),
            "success": True,
            "verdict": Verdict(success=True, peak=0.75, peak_frame_index=5, threshold=0.5),
            "clipped_count": 3,
            "policy_name": "flow-mini",
            "policy_sha256": "ab" * 32,
            "contract": CONTRACT,
            "metadata": {"noise": 1.5, "tags": ["a", None]},
            "frame_source": random.integers(0, 256, (8, 24, 32, 3), dtype=np.uint8),
        }
        return Episode(**{**values, **changes})

    return make
