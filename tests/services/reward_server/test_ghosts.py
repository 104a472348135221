"""Half-faded bottles: what they are mixed from and how they are labelled."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.reward_server.frame_cache import LabelledFrames, labelled_frames
from services.reward_server.ghosts import FADED, SOLID, draw_ghosts, mix, nearest_failures, smear


@pytest.fixture(scope="module")
def data(blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> LabelledFrames:
    return labelled_frames([blocks], tmp_path_factory.mktemp("cache"), range(51, 201, 10))


def test_a_mixture_is_between_its_frames() -> None:
    success, failure = np.full((2, 4, 4, 3), 200, np.uint8), np.full((2, 4, 4, 3), 100, np.uint8)
    mixed = mix(success, failure, np.array([0.25, 1.0]))
    assert (mixed[0] == 125).all()
    assert (mixed[1] == 200).all()


def test_the_failure_is_of_the_same_moment_and_the_most_similar(data: LabelledFrames) -> None:
    k = data.labels.shape[1]
    failures = np.flatnonzero(~data.success)
    positions = np.array([0 * k + 3, 2 * k + 9])
    nearest = nearest_failures(data, positions, failures, np.random.default_rng(0))
    assert (nearest % k == positions % k).all()
    assert set(nearest // k) <= set(failures)
    own = int(failures[0]) * k + 5
    assert nearest_failures(data, np.array([own]), failures[:1], np.random.default_rng(0)).tolist() == [own]


def test_half_are_faded_and_half_solid_and_the_seed_decides(data: LabelledFrames) -> None:
    successes, failures = np.flatnonzero(data.success), np.flatnonzero(~data.success)
    last = successes * data.labels.shape[1] + data.labels.shape[1] - 1
    drawn = [draw_ghosts(data, last, failures, 10, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert drawn[0].targets.tolist() == [0.0, 1.0] * 5
    assert drawn[0].frames.tobytes() == drawn[1].frames.tobytes()
    assert drawn[0].frames.tobytes() != drawn[2].frames.tobytes()
    assert draw_ghosts(data, last, failures, 0, np.random.default_rng(0)).frames.shape == (0, 96, 128, 3)
    assert 0.0 < FADED < SOLID < 1.0


def test_a_smear_keeps_size_and_mean() -> None:
    values = torch.rand((2, 3, 96, 128), generator=torch.Generator().manual_seed(0))
    smeared = smear(values, 4)
    assert smeared.shape == values.shape
    assert float((smeared.mean() - values.mean()).abs()) < 1e-3
    assert float(smeared.std()) < 0.5 * float(values.std())
