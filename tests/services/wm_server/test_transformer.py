import numpy as np
import pytest
import torch

from services.wm_server.dataset import Batch
from services.wm_server.transformer import TransformerConfig, group_actions
from services.wm_server.transformer_training import TransformerTrainingConfig, flow_matching_loss, initialised
from tests.services.wm_server.conftest import TINY_TRANSFORMER, make_model


def test_actions_are_grouped_like_latent_frames():
    actions = torch.arange(9.0)[None, :, None]
    assert group_actions(actions)[0].tolist() == [[0, 0, 0, 0], [1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize("objective", ["clean", "velocity"])
@pytest.mark.parametrize("cross_attention", [False, True])
@pytest.mark.parametrize("helpers", [False, True])
def test_every_wiring_predicts_futures(objective, cross_attention, helpers):
    config = {} if helpers else {"position_channels": 0, "spatial_action_channels": 0, "reference_latents": False}
    model = make_model(objective=objective, cross_attention=cross_attention, **config).transformer
    clean = model.clean(torch.zeros(2, 4, 16, 2, 4), torch.ones(2, 16), torch.zeros(2, 61, 20), torch.zeros(2, 4, 2, 4))
    assert clean.shape == (2, 4, 13, 2, 4)
    assert torch.isfinite(clean).all()


def test_published_wiring_has_no_helpers_and_is_driven_by_poses():
    config = TransformerConfig.published_bwm(30, 40)
    assert (config.dimensions, config.layers, config.conditioning_dimensions) == (3072, 30, 14)
    assert not (config.position_channels or config.spatial_action_channels or config.reference_latents)
    assert config.cross_attention
    assert config.objective == "velocity"


def batch(random: np.random.Generator) -> Batch:
    latents = torch.from_numpy(random.normal(size=(3, 4, 16, 2, 4)).astype(np.float32))
    anchors = torch.zeros(3, 32, 64, 3, dtype=torch.uint8)
    return Batch(latents, torch.ones(3, 13, 2, 4), torch.zeros(3, 61, 20), anchors)


def test_untrained_clean_loss_is_the_distance_to_the_last_history_latent():
    model = initialised(TINY_TRANSFORMER, 0)  # its output layer starts at zero
    config = TransformerTrainingConfig(model=TINY_TRANSFORMER)
    data = batch(np.random.default_rng(0))
    expected = (data.latents[:, :, 3:] - data.latents[:, :, 2:3]).square().mean()
    loss = flow_matching_loss(model, data, config, np.random.default_rng(1))
    torch.testing.assert_close(loss, expected)


def test_loss_reads_future_latents_only_through_the_noise_and_by_their_weights():
    model = make_model().transformer
    config = TransformerTrainingConfig(model=TINY_TRANSFORMER, pure_noise_fraction=1.0)
    data = batch(np.random.default_rng(0))
    data.weights[:, 5:] = 0.0
    before = flow_matching_loss(model, data, config, np.random.default_rng(1))
    data.latents[:, :, 3 + 5 :] += 100.0
    after = flow_matching_loss(model, data, config, np.random.default_rng(1))
    torch.testing.assert_close(before, after)
