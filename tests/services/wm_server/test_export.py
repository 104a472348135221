import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from services.wm_server.export import ExportConfig, export, store_half
from services.wm_server.model import WorldModel
from tests.services.wm_server.conftest import make_episode, make_model
from worldserve.contract import adjust_bottle
from worldserve.episodes import EpisodeWriter


@pytest.fixture
def run(tmp_path):
    contract = adjust_bottle("simulator", "made", {})
    with EpisodeWriter(tmp_path / "data") as writer:
        for number in range(8):
            writer.append(dataclasses.replace(make_episode(number, success=number % 2 == 0), contract=contract))
    card = {
        "data": [str(tmp_path / "data")], "training_episodes": 4, "training_failures": 2, "held_out_episodes": 4,
        "steps": 3, "cpu_s": 1.5, "seed": 0, "config": {"held_out_fraction": 0.5},
    }  # fmt: skip
    make_model(seed=1).save(tmp_path / "run" / "model", card)
    return tmp_path / "run"


def test_weights_are_stored_as_float16_and_used_as_float32(run, tmp_path):
    export(ExportConfig(run=run, out=tmp_path / "weights", measure_episodes=0))
    stored = load_file(str(tmp_path / "weights" / "model.safetensors"))
    assert {value.dtype for value in stored.values()} == {torch.float16}
    model, original = WorldModel.load(tmp_path / "weights"), WorldModel.load(run / "model")
    for mine, theirs in zip(model.transformer.parameters(), original.transformer.parameters()):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_figures_are_those_of_what_is_shipped_and_the_card_says_them(run, tmp_path):
    figures = export(ExportConfig(run=run, out=tmp_path / "weights", measure_episodes=2, command="train it"))
    config = json.loads((tmp_path / "weights" / "config.json").read_text(encoding="utf-8"))
    assert config["figures"] == figures
    card = (tmp_path / "weights" / "card.md").read_text(encoding="utf-8")
    assert config["sha256"] in card and "train it" in card and f"{figures['moving']['right_db']:.1f} dB" in card


@pytest.mark.parametrize(("width", "said"), [(0, False), (8, True)])
def test_the_card_says_what_a_draft_reads(tmp_path, width, said):
    card = {"data": ["d"], "training_episodes": 4, "training_failures": 2, "held_out_episodes": 4, "steps": 3, "cpu_s": 1.5, "seed": 0}  # fmt: skip
    make_model(draft_width=width).save(tmp_path / "run" / "model", card)
    export(ExportConfig(run=tmp_path / "run", out=tmp_path / "weights", measure_episodes=0))
    text = (tmp_path / "weights" / "card.md").read_text(encoding="utf-8")
    line = "- Draft: a recurrent network of width 8, which reads the episode's first frame and all of its actions"
    assert (line in text) is said
    assert ("Draft" in text) is said


def test_an_older_export_is_replaced_and_nothing_else_stays(run, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "old.txt").touch()
    export(ExportConfig(run=run, out=tmp_path / "weights", measure_episodes=0))
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [
        "card.md",
        "config.json",
        "model.safetensors",
    ]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_weight_too_large_for_float16_is_named(run, tmp_path):
    model = WorldModel.load(run / "model")
    model.codec.latent_mean[0, 0] = 1e6
    model.save(tmp_path / "large", {})
    with pytest.raises(ValueError, match=r"codec\.latent_mean"):
        store_half(tmp_path / "large", tmp_path / "half")


def test_a_run_without_a_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="got none"):
        export(ExportConfig(run=tmp_path, out=tmp_path / "weights"))
