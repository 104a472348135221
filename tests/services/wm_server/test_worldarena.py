"""A world model behind WorldArena's API: the same window as in its own episodes, and samples that do not meet."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from services.wm_server.backend import WorldModelBackend
from services.wm_server.model import WorldModel
from services.wm_server.worldarena import WindowPredictor
from worldserve.adapters.worldarena import Sample
from worldserve.episodes import InitialState
from worldserve.messages import BackendChunk, BackendStep, ResetItem

NAME = "adjust_bottle/train/0000"


def targets(count: int) -> np.ndarray:
    actions = np.zeros((count, 14), np.float32)
    actions[:, 7] = np.linspace(0.01, 0.5, count)
    actions[:, [6, 13]] = 1.0
    return actions


def sample(state: InitialState, **changes: object) -> Sample:
    made = Sample(
        "s", 3, state.frame[None], np.zeros((0, 14), np.float32), state.proprioception[None], None, targets(50)
    )
    return dataclasses.replace(made, **changes)


def test_a_prediction_from_the_first_frame_is_the_episodes_own_first_chunk(
    model: WorldModel, states: dict[str, InitialState]
) -> None:
    backend = WorldModelBackend(model, states)
    backend.reset([ResetItem("a", NAME, seed=3)])
    [chunk] = backend.step([BackendStep("a", 0, 0, targets(50), tuple(range(1, 51)))])
    assert isinstance(chunk, BackendChunk)
    [frames] = WindowPredictor(model).predict([sample(states[NAME])])
    np.testing.assert_array_equal(frames, chunk.frames)


def test_a_sample_depends_neither_on_the_others_nor_on_how_many_frames_are_asked(
    model: WorldModel, states: dict[str, InitialState]
) -> None:
    predictor = WindowPredictor(model)
    history = np.stack([states[f"adjust_bottle/train/{number:04d}"].frame for number in range(4)])
    longer = sample(states[NAME], frames=history, context_actions=targets(3), states=None, actions=targets(8))
    [alone] = predictor.predict([longer])
    among = predictor.predict([sample(states[NAME], seed=9), longer])
    assert alone.shape == (8, *history.shape[1:])
    np.testing.assert_array_equal(among[1], alone)
    [fewer] = predictor.predict([dataclasses.replace(longer, seed=4)])
    assert not np.array_equal(fewer, alone)


def test_context_frames_are_read(model: WorldModel, states: dict[str, InitialState]) -> None:
    predictor = WindowPredictor(model)
    history = np.stack([states[f"adjust_bottle/train/{number:04d}"].frame for number in range(3)])
    seen = sample(states[NAME], frames=history, context_actions=targets(2), states=None, actions=targets(5))
    [one] = predictor.predict([seen])
    [other] = predictor.predict([dataclasses.replace(seen, frames=history[[0, 2, 1]])])
    assert not np.array_equal(one, other)


def test_images_of_another_size_are_resized_both_ways(model: WorldModel, states: dict[str, InitialState]) -> None:
    predictor = WindowPredictor(model, image_size=(64, 64))
    large = np.zeros((1, 64, 64, 3), np.uint8)
    [frames] = predictor.predict([sample(states[NAME], frames=large, actions=targets(2))])
    assert frames.shape == (2, 64, 64, 3)
    assert predictor.model_version != WindowPredictor(model).model_version


@pytest.mark.parametrize("count", [1, 50])
def test_every_context_of_the_profile_is_taken(count: int, model: WorldModel, states: dict[str, InitialState]) -> None:
    frames = np.repeat(states[NAME].frame[None], count, axis=0)
    asked = sample(states[NAME], frames=frames, context_actions=targets(count - 1), states=None, actions=targets(1))
    [drawn] = WindowPredictor(model).predict([asked])
    assert len(drawn) == 1
