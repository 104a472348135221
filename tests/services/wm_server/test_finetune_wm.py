import dataclasses
import json
import shutil

import numpy as np
import pytest

from services.wm_server import dataset
from services.wm_server.codec_training import CodecTrainingConfig
from services.wm_server.episodes import is_held_out, load_episodes
from services.wm_server.finetune_wm import Finetune, FinetuneConfig
from services.wm_server.model import WorldModel
from services.wm_server.transformer_training import TransformerTrainingConfig
from tests.services.wm_server.conftest import TINY_CODEC, TINY_TRANSFORMER, make_episode
from worldserve.contract import adjust_bottle
from worldserve.episodes import EpisodeWriter, SealedStateError


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    contract = adjust_bottle("simulator", "made", {})
    directory = tmp_path_factory.mktemp("data")
    with EpisodeWriter(directory / "data") as writer:
        for number in range(6):
            episode = make_episode(number, success=number % 2 == 0)
            writer.append(dataclasses.replace(episode, contract=contract))
    return directory / "data"


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A finished run of all stages; read only."""
    finished = Finetune(settings(data, tmp_path_factory.mktemp("finished")))
    assert finished.run()
    return finished


def settings(data, out, **training) -> FinetuneConfig:
    return FinetuneConfig(
        out=out,
        data=(data,),
        codec=CodecTrainingConfig(model=TINY_CODEC, steps=2, batch_groups=2, groups_per_episode=2),
        transformer=TransformerTrainingConfig(
            model=TINY_TRANSFORMER, batch_size=2, checkpoint_steps=2, **{"steps": 4, **training}
        ),
        held_out_fraction=0.3,
        measure_episodes=2,
    )


def test_held_out_states_are_the_same_whatever_else_is_there():
    held = [is_held_out(f"adjust_bottle/train/{number:04d}", 0.1) for number in range(1000)]
    assert 70 < sum(held) < 130
    assert held == [is_held_out(f"adjust_bottle/train/{number:04d}", 0.1) for number in range(1000)]


def test_all_stages_and_a_model_that_loads(run):
    model = WorldModel.load(run.out / "model")
    assert model.frame_shape == (32, 64, 3)
    measured = json.loads((run.out / "measure.json").read_text())
    assert measured["moving"]["windows"] > 0
    rows = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert {row["stage"] for row in rows} == {"codec", "validation"}


def test_an_interrupted_run_goes_on_to_the_same_weights(run, data, tmp_path):
    config = settings(data, tmp_path, stop_after_cpu_s=1e-9)
    for name in ("codec.safetensors", "codec.json"):
        shutil.copy(run.out / name, tmp_path / name)
    shutil.copytree(run.out / "latents", tmp_path / "latents")
    config = dataclasses.replace(config, stage="transformer")
    finished = [Finetune(config).run() for _ in range(4)]
    assert finished == [False, False, False, True]
    expected, got = (WorldModel.load(out / "model").transformer.state_dict() for out in (run.out, tmp_path))
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name].numpy(), value.numpy(), err_msg=name)


def test_fine_tuning_starts_from_a_model_and_keeps_its_codec(run, data, tmp_path):
    config = dataclasses.replace(settings(data, tmp_path, steps=2), start=run.out / "model", measure_episodes=1)
    Finetune(config).run()
    base, tuned = (WorldModel.load(out / "model") for out in (run.out, tmp_path))
    for name, value in base.codec.state_dict().items():
        np.testing.assert_array_equal(tuned.codec.state_dict()[name].numpy(), value.numpy(), err_msg=name)
    assert base.sha256 != tuned.sha256


def test_damaged_weights_are_refused(run, tmp_path):
    shutil.copytree(run.out / "model", tmp_path / "model")
    with (tmp_path / "model" / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="hash"):
        WorldModel.load(tmp_path / "model")


def test_test_states_never_train(tmp_path):
    with EpisodeWriter(tmp_path / "data") as writer:
        episode = dataclasses.replace(make_episode(0), initial_state_id="adjust_bottle/test/0001")
        writer.append(dataclasses.replace(episode, contract=adjust_bottle("simulator", "made", {})))
    with pytest.raises(SealedStateError, match="sealed"):
        load_episodes([tmp_path / "data"], 0.1)


def test_mirroring_twice_the_windows(run):
    training, validation = run.latents()
    assert len(training) == 2 * 4 * len(run.training)
    assert len(validation) == 4 * len(run.validation)
    assert dataset.FUTURE_LATENTS == 13


def test_sampling_shares(run):
    windows, _ = run.latents()
    shares = windows.probabilities({0: 0.25, 50: 0.75}, failure_fraction=0.8)
    by_start = {t: sum(p for p, row in zip(shares, windows.rows) if row["t"] == t) for t in (0, 50, 100, 150)}
    assert by_start == pytest.approx({0: 0.25, 50: 0.75, 100: 0.0, 150: 0.0})
    assert sum(p for p, row in zip(shares, windows.rows) if not row["success"]) == pytest.approx(0.8)
