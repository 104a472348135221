import dataclasses

import pytest
import torch

from services.wm_server.transformer import TransformerConfig, group_actions
from services.wm_server.transformer_training import initialised
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


@pytest.mark.parametrize("helper", ["draft_width", "pose_map_channels"])
def test_what_works_in_metres_needs_rotation_columns(helper):
    with pytest.raises(ValueError, match=r"conditioning_dimensions: expected 20 .*got 14"):
        dataclasses.replace(TINY_TRANSFORMER, conditioning_dimensions=14, **{helper: 8})
    assert not dataclasses.replace(TINY_TRANSFORMER, conditioning_dimensions=14).in_metres


def test_with_a_draft_an_untrained_transformer_gives_the_draft():
    model = initialised(dataclasses.replace(TINY_TRANSFORMER, draft_width=16), 0)  # its output layer starts at zero
    torch.nn.init.normal_(model.draft.draw[-1].bias, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    latents, conditioning = torch.randn(2, 4, 16, 2, 4, generator=generator), torch.zeros(2, 61, 20)
    anchor, chunks = torch.zeros(2, 3, 32, 64), torch.tensor([0, 2])
    memory = model.memory(latents[:, :, 0], anchor, torch.zeros(2, 2, 61, 20), chunks)
    clean = model.clean(latents, torch.ones(2, 16), conditioning, torch.zeros(2, 4, 2, 4), anchor, memory)
    drawn = model.draft(memory, latents[:, :, 0], anchor, conditioning)
    torch.testing.assert_close(clean, drawn)
    assert float(drawn.detach().abs().mean()) > 0.1
