"""Synthetic episodes: a bright block that is lifted into the sky (success), or stays down or half-way (failure)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from worldserve.episodes import Episode, EpisodeWriter

FRAMES = 201


def block_frames(heights: np.ndarray, x: int, generator: np.random.Generator) -> np.ndarray:
    """uint8 (n, 96, 128, 3): sky over table, and an 8x8 block whose bottom is `heights` pixels above row 80."""
    frames = np.empty((len(heights), 96, 128, 3), np.uint8)
    frames[:, :40], frames[:, 40:] = (165, 176, 184), (205, 200, 190)
    frames[:] += (
        generator.integers(0, 4, (1, 12, 16, 3), dtype=np.uint8).repeat(8, 1).repeat(8, 2)
    )  # still: decodes fast
    for frame, height in zip(frames, heights.astype(int)):
        frame[72 - height : 80 - height, x : x + 8] = (150, 40, 30)
    return frames


def lift(top: int) -> np.ndarray:
    """Heights (201,): down, rising over actions 90..109, then held at `top`."""
    return np.clip((np.arange(FRAMES) - 90) * top / 20.0, 0, top)


def make_episode(index: int, success: bool, generator: np.random.Generator, state: int | None = None) -> Episode:
    top = int(generator.integers(50, 60)) if success else int(generator.choice([0, 20]))
    actions = np.zeros((FRAMES - 1, 14), np.float32)
    return Episode(
        episode_id=f"block/{index}",
        initial_state_id=f"adjust_bottle/train/{index if state is None else state:04d}",
        seed=0,
        instruction="lift",
        requested_actions=actions,
        executed_actions=actions,
        proprioception=np.zeros((FRAMES, 14), np.float32),
        rewards=np.zeros(FRAMES - 1, np.float32),
        success=success,
        metadata={"success_after_chunk": [False, False, success, success]},
        frame_source=block_frames(lift(top), int(generator.integers(10, 110)), generator),
    )


def write_blocks(directory: Path, count: int, seed: int, first_state: int = 0) -> Path:
    generator = np.random.default_rng(seed)
    with EpisodeWriter(directory) as writer:
        for index in range(count):
            writer.append(make_episode(index, index % 2 == 0, generator, first_state + index))
    return directory


@pytest.fixture(scope="session")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 episodes, half of them successes, of states 0..15."""
    return write_blocks(tmp_path_factory.mktemp("blocks") / "data", 16, seed=0)


@pytest.fixture(scope="session")
def other_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 episodes of states 500..503."""
    return write_blocks(tmp_path_factory.mktemp("blocks") / "other", 4, seed=1, first_state=500)
