"""The two losses: what they read, and that neither moves the other's weights."""

import dataclasses

import numpy as np
import pytest
import torch

from services.wm_server.dataset import Batch
from services.wm_server.losses import NoiseLevels, draft_loss, flow_matching_loss
from services.wm_server.transformer_training import initialised
from tests.services.wm_server.conftest import TINY_TRANSFORMER, make_model

DRAFTED = dataclasses.replace(TINY_TRANSFORMER, draft_width=16)


def batch() -> Batch:
    latents = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 4, 16, 2, 4)).astype(np.float32))
    anchors = torch.zeros(3, 32, 64, 3, dtype=torch.uint8)
    past, chunks = torch.zeros(3, 0, 61, 20), torch.zeros(3, dtype=torch.int64)
    return Batch(latents, torch.ones(3, 13, 2, 4), torch.zeros(3, 61, 20), anchors, past, chunks)


def test_untrained_flow_matching_is_the_distance_to_the_last_history_latent() -> None:
    """The output layer starts at zero."""
    data = batch()
    expected = (data.latents[:, :, 3:] - data.latents[:, :, 2:3]).square().mean()
    loss = flow_matching_loss(initialised(TINY_TRANSFORMER, 0), data, NoiseLevels(), np.random.default_rng(1))
    torch.testing.assert_close(loss, expected)


def test_an_untrained_draft_is_zero_and_its_loss_weighs_the_chunks_of_an_episode() -> None:
    """Three windows of one episode: the second counts, the others do not."""
    data = dataclasses.replace(batch(), past=torch.zeros(3, 2, 61, 20), chunks=torch.tensor([0, 1, 2]))
    data.weights[[0, 2]] = 0.0
    loss = draft_loss(initialised(DRAFTED, 0), data, NoiseLevels(), np.random.default_rng(1))
    torch.testing.assert_close(loss, data.latents[1, :, 3:].square().mean())


def test_loss_reads_future_latents_only_through_the_noise_and_by_their_weights() -> None:
    model, levels, data = make_model().transformer, NoiseLevels(pure_noise_fraction=1.0), batch()
    data.weights[:, 5:] = 0.0
    before = flow_matching_loss(model, data, levels, np.random.default_rng(1))
    data.latents[:, :, 3 + 5 :] += 100.0
    after = flow_matching_loss(model, data, levels, np.random.default_rng(1))
    torch.testing.assert_close(before, after)


@pytest.mark.parametrize(("loss_of", "moved"), [(flow_matching_loss, "wan."), (draft_loss, "draft.")])
def test_each_loss_moves_its_own_weights(loss_of, moved: str) -> None:
    model = initialised(DRAFTED, 0)
    loss_of(model, batch(), NoiseLevels(), np.random.default_rng(1)).backward()
    names = [name for name, value in model.named_parameters() if value.grad is not None]
    assert names
    assert all(name.startswith("draft.") == (moved == "draft.") for name in names)
    assert any(name.startswith(moved) for name in names)
