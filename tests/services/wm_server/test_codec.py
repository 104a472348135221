import numpy as np
import pytest
import torch

from services.wm_server.codec import emphasis_weights, to_float, to_uint8
from services.wm_server.codec_training import CodecTrainingConfig, initialised, train_codec
from tests.services.wm_server.conftest import TINY_CODEC, make_episode


def test_grid_of_latents():
    codec = initialised(TINY_CODEC, 0)
    with torch.inference_mode():
        latents = codec.encode(torch.zeros(2, 61, 3, 32, 64))
        assert latents.shape == (2, 4, 16, 2, 4)
        assert codec.decode(latents[:, :, 1:], torch.zeros(2, 3, 32, 64)).shape == (2, 60, 3, 32, 64)
    with pytest.raises(ValueError, match="4n\\+1"):
        codec.encode(torch.zeros(1, 60, 3, 32, 64))


def test_first_frame_stands_alone_and_groups_see_only_themselves_and_it():
    codec = initialised(TINY_CODEC, 0)
    generator = torch.Generator().manual_seed(0)
    clip = torch.rand(1, 13, 3, 32, 64, generator=generator)
    changed = clip.clone()
    changed[:, 6] = 0.0
    with torch.inference_mode():
        same = (codec.encode(clip) == codec.encode(changed)).flatten(3).all(-1).all(1)[0]
    assert same.tolist() == [True, True, False, True]


def test_pixels_survive_the_way_to_floats_and_back():
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(1, 16, 16, 3)
    assert torch.equal(to_uint8(to_float(pixels)), pixels)


def test_weights_are_one_where_nothing_moved_and_highest_where_colour_changed():
    reference = torch.zeros(1, 3, 16, 16)
    groups = reference[:, None].repeat(1, 4, 1, 1, 1)
    groups[:, :, :, :4] += 0.5
    groups[:, :, 0, 8:12] += 0.5
    weights = emphasis_weights(groups, reference)[0, 0, 0, :, 0]
    assert weights[15] == 1.0
    assert 1.0 < weights[0] < weights[8]


def test_training_resumes_to_the_same_weights(tmp_path):
    episodes = [make_episode(0), make_episode(1)]

    def config(steps: int) -> CodecTrainingConfig:
        return CodecTrainingConfig(model=TINY_CODEC, steps=steps, batch_groups=2, groups_per_episode=4)

    whole = train_codec(episodes, config(4), tmp_path / "whole", seed=1)
    again = train_codec(episodes, config(4), tmp_path / "whole", seed=1)
    for name, value in whole.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), again.state_dict()[name].numpy(), err_msg=name)
    assert (tmp_path / "whole" / "codec.safetensors").exists()


def test_training_lowers_the_error(tmp_path):
    import json

    config = CodecTrainingConfig(model=TINY_CODEC, steps=75, batch_groups=4, groups_per_episode=8)
    train_codec([make_episode(0), make_episode(1)], config, tmp_path, seed=0)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["group_loss"] < 0.8 * rows[0]["group_loss"]
