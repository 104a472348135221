"""The two losses: what they read, and that neither moves the other's weights."""

import dataclasses

import numpy as np
import pytest
import torch

from services.wm_server.dataset import Batch
from services.wm_server.losses import ANCHOR_NOISE, NoiseLevels, draft_loss, flow_matching_loss
from services.wm_server.transformer_training import initialised
from services.wm_server.windows import PoseStatistics
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
    loss = draft_loss(initialised(DRAFTED, 0), data, np.random.default_rng(1))
    torch.testing.assert_close(loss, data.latents[1, :, 3:].square().mean())


def test_the_draft_is_compared_chunk_by_chunk_with_what_follows_each_window() -> None:
    """Two episodes of three windows. The same from `memory` and `forward`, as the network is used, of grainy anchors."""
    random = np.random.default_rng(2)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.uniform(-1, 1, shape).astype(np.float32))

    anchors = torch.from_numpy(random.integers(0, 256, (2, 32, 64, 3)).astype(np.uint8))
    first, windows = uniform(2, 4, 2, 4), uniform(2, 3, 61, 20)
    latents, weights = uniform(2, 3, 4, 16, 2, 4), uniform(2, 3, 13, 2, 4) + 2.0
    latents[:, :, :, 0] = first[:, None]  # an episode's windows have one anchor
    data = Batch(
        latents.flatten(0, 1), weights.flatten(0, 1), windows.flatten(0, 1), anchors.repeat_interleave(3, 0),
        torch.zeros(6, 0, 61, 20), torch.tensor([0, 1, 2, 0, 1, 2]),
    )  # fmt: skip
    # Hands that are somewhere in the frame, and large weights, by which grain counts.
    model = initialised(DRAFTED, 0, PoseStatistics.workspace()).requires_grad_(False)
    draft = model.draft
    torch.nn.init.normal_(draft.draw[2].weight, generator=torch.Generator().manual_seed(3))
    for value in draft.hand_views.parameters():
        value.mul_(4.0)
    generator = torch.Generator().manual_seed(int(np.random.default_rng(1).integers(2**62)))
    grain = torch.empty(2, 3, 32, 64).normal_(generator=generator)
    seen = anchors.movedim(-1, 1).float() / 127.5 - 1.0 + ANCHOR_NOISE * grain
    squares = torch.tensor(0.0)
    for chunk in range(3):
        memory = draft.memory(first, seen, windows[:, :chunk], torch.tensor([chunk, chunk]))
        drawn = draft(memory, first, seen, windows[:, chunk])
        squares += ((drawn - latents[:, chunk, :, 3:]).square() * weights[:, chunk, None]).sum()
    loss = draft_loss(model, data, np.random.default_rng(1))
    torch.testing.assert_close(loss, squares / (4 * weights.sum()), rtol=1e-5, atol=0)


def test_loss_reads_future_latents_only_through_the_noise_and_by_their_weights() -> None:
    model, levels, data = make_model().transformer, NoiseLevels(pure_noise_fraction=1.0), batch()
    data.weights[:, 5:] = 0.0
    before = flow_matching_loss(model, data, levels, np.random.default_rng(1))
    data.latents[:, :, 3 + 5 :] += 100.0
    after = flow_matching_loss(model, data, levels, np.random.default_rng(1))
    torch.testing.assert_close(before, after)


@pytest.mark.parametrize(
    ("loss_of", "moved"),
    [(lambda *args: flow_matching_loss(*args[:2], NoiseLevels(), args[2]), "wan."), (draft_loss, "draft.")],
    ids=["flow matching", "draft"],
)
def test_each_loss_moves_its_own_weights(loss_of, moved: str) -> None:
    model = initialised(DRAFTED, 0)
    loss_of(model, batch(), np.random.default_rng(1)).backward()
    names = [name for name, value in model.named_parameters() if value.grad is not None]
    assert names
    assert all(name.startswith("draft.") == (moved == "draft.") for name in names)
    assert any(name.startswith(moved) for name in names)
