"""One training: what stops it, what it refuses, and the errors that it reports."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from services.wm_server.dataset import LatentWindows
from services.wm_server.sampler import noised
from services.wm_server.transformer_training import TransformerTraining, latent_errors
from services.wm_server.windows import PoseStatistics
from tests.services.wm_server.conftest import TINY_TRANSFORMER, TRAINING, make_model

SCALE = PoseStatistics.workspace()


@pytest.mark.parametrize(
    ("name", "said"), [("wan.proj_out.weight", "the transformer's gradient"), ("draft.draw.0.bias", "the draft's gradient")]
)  # fmt: skip
def test_a_gradient_that_is_not_finite_reaches_no_weight(windows: Path, tmp_path: Path, name: str, said: str) -> None:
    training = TransformerTraining(LatentWindows([windows], SCALE), TRAINING, tmp_path, 1, statistics=SCALE)
    before = {key: value.clone() for key, value in training.model.state_dict().items()}
    training.model.get_parameter(name).register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(FloatingPointError, match=f"{said} is (nan|inf) at step 0.*another --out") as caught:
        training.run()
    assert "lower transformer.learning_rate" in str(caught.value)
    torch.testing.assert_close(training.model.state_dict(), before, rtol=0, atol=0)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("helper", ["draft_width", "pose_map_channels"])
def test_what_works_in_metres_needs_the_scale_of_poses(windows: Path, tmp_path: Path, helper: str) -> None:
    config = dataclasses.replace(TRAINING, model=dataclasses.replace(TINY_TRANSFORMER, **{helper: 8}))
    shard = LatentWindows([windows], SCALE)
    with pytest.raises(ValueError, match="statistics: expected"):
        TransformerTraining(shard, config, tmp_path, 1)
    start = make_model(**{helper: 8}).transformer.state_dict()
    assert TransformerTraining(shard, config, tmp_path, 1, start=start).step == 0


def test_errors_are_of_predictions_from_a_history_with_the_samplers_noise(windows: Path) -> None:
    model, shard = make_model(draft_width=8).transformer, LatentWindows([windows], SCALE)
    found = latent_errors(model, shard, 12, 3, history_noise=0.4)
    rows = [2, 6, 10]  # those after frame 100
    batch = shard.batch(rows)
    noise = np.random.default_rng([3, 5, 100, 2]).standard_normal(batch.latents.shape, dtype=np.float32)
    sigmas = torch.tensor([0.0] + 2 * [0.4] + 13 * [1.0]).expand(3, 16)
    shown = noised(batch.latents, torch.from_numpy(noise), sigmas[:, None, :, None, None])
    anchors = batch.anchors.movedim(-1, 1).float() / 127.5 - 1.0
    memory = model.memory(batch.latents[:, :, 0], anchors, batch.past, batch.chunks)
    last, future = batch.latents[:, :, 2], batch.latents[:, :, 3:]

    def error(drawn: torch.Tensor) -> float:
        weights = batch.weights[:, None].expand_as(future)
        return float(((drawn - future).square() * weights).sum() / weights.sum())

    for name, order in (("right", [0, 1, 2]), ("shuffled", [2, 0, 1])):
        drawn = model.clean(shown, sigmas, batch.conditioning[order], last, anchors, memory)
        assert found[f"latent_error/{name}_100"] == pytest.approx(error(drawn), rel=1e-5)
    draft = model.draft(memory, batch.latents[:, :, 0], anchors, batch.conditioning)
    assert found["latent_error/draft_100"] == pytest.approx(error(draft), rel=1e-5)
    assert len(found) == 12


def test_without_a_draft_there_is_no_error_of_one(windows: Path) -> None:
    found = latent_errors(make_model().transformer, LatentWindows([windows], SCALE), 12, 3, history_noise=0.05)
    assert sorted({name.split("/")[1].split("_")[0] for name in found}) == ["right", "shuffled"]
