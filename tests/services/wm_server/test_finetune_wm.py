import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.wm_server.codec_training import CodecTrainingConfig
from services.wm_server.episodes import is_held_out, load_episodes
from services.wm_server.finetune_wm import Finetune, FinetuneConfig, main
from services.wm_server.mixing import directory_of_episodes, mixed_probabilities
from services.wm_server.model import WorldModel
from services.wm_server.sampler import SamplerConfig
from services.wm_server.transformer_training import TransformerTrainingConfig
from services.wm_server.windows import PoseStatistics
from tests.services.wm_server.conftest import TINY_CODEC, TINY_TRANSFORMER, make_episode, make_model
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


@pytest.fixture
def copied(run, tmp_path):
    """A finished run that a test may write to."""
    return shutil.copytree(run.out, tmp_path / "copied")


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


def test_a_codec_is_kept_of_a_model_and_of_a_run_alike(run, data, tmp_path):
    for name, source in (("of-run", run.out), ("of-model", run.out / "model")):
        tuned = Finetune(dataclasses.replace(settings(data, tmp_path / name, steps=2), codec_of=source))
        for key, value in run.codec().state_dict().items():
            np.testing.assert_array_equal(tuned.codec().state_dict()[key].numpy(), value.numpy(), err_msg=key)
        kind = {"of-run": "codec_sha256", "of-model": "model_sha256"}[name]
        assert f"codec_of.{kind}" in json.loads((tmp_path / name / "inputs.json").read_text())
    (tmp_path / "none").mkdir()
    with pytest.raises(FileNotFoundError, match="expected a directory of"):
        Finetune(dataclasses.replace(settings(data, tmp_path / "out"), codec_of=tmp_path / "none"))


def with_changes(config: FinetuneConfig, changes: dict) -> FinetuneConfig:
    """`config` with settings changed at once, by their dotted names."""
    groups: dict = {}
    for name, value in changes.items():
        group, _, rest = name.partition(".")
        inner = groups.get(group, getattr(config, group))
        groups[group] = with_changes(inner, {rest: value}) if rest else value
    return dataclasses.replace(config, **groups)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": (Path("/other"),)}, r"data: expected \['[^']*/data'\]; got \['/other'\]"),
        ({"seed": 1}, "seed: expected 0; got 1"),
        ({"start": "MODEL"}, r"start: expected None; got \['.*/model'\]"),
        ({"held_out_fraction": 0.5}, r"held_out_fraction: expected 0\.3; got 0\.5"),
        ({"codec.steps": 9}, r"codec\.steps: expected 2; got 9"),
        ({"windows.mirror": False}, r"windows\.mirror: expected True; got False"),
        ({"transformer.steps": 8}, r"transformer\.steps: expected 4; got 8"),
        (
            {"transformer.data_weights": (2.0,)},
            r"transformer\.data_weights: expected nothing \(not recorded\); got \[2\.0\]",
        ),
        ({"transformer.model.layers": 2}, r"transformer\.model\.layers: expected 1; got 2"),
        ({"sigmas": (1.0, 0.5)}, r"sigmas: expected \[1\.0\]; got \[1\.0, 0\.5\]"),
        ({"stage": "measure", "held_out_fraction": 0.2}, r"held_out_fraction: expected 0\.3; got 0\.2"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_finished_run_is_not_gone_on_with_under_other_settings(run, data, changes, message):
    recorded = (run.out / "config.json").read_bytes()
    changes = {name: run.out / "model" if value == "MODEL" else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=message) as error:
        Finetune(with_changes(settings(data, run.out), changes))
    assert "holds a run that was made with other settings" in str(error.value)
    assert "another --out" in str(error.value)
    assert (run.out / "config.json").read_bytes() == recorded


def test_every_changed_setting_is_named(run, data):
    with pytest.raises(ValueError, match="other settings") as error:
        Finetune(with_changes(settings(data, run.out), {"seed": 7, "transformer.batch_size": 3}))
    assert str(error.value).splitlines()[1:3] == [
        "  seed: expected 0; got 7",
        "  transformer.batch_size: expected 2; got 3",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": 2, "measure_episodes": 9, "transformer.stop_after_cpu_s": 5.0, "transformer.checkpoint_steps": 1},
        {"stage": "measure", "transformer.steps": 99, "seed": 3},
        {"device": "cpu", "precision": "fp32", "reward": "127.0.0.1:1"},
    ],
)
def test_how_a_run_is_carried_out_may_change(copied, data, changes):
    changed = with_changes(settings(data, copied), changes)
    assert Finetune(changed).config == changed


def test_the_same_data_by_another_path_is_the_same(copied, data, monkeypatch):
    monkeypatch.chdir(data.parent)
    assert len(Finetune(settings(Path("data"), copied)).training) > 0


def test_settings_of_a_stage_that_has_not_begun_may_change(run, data, tmp_path):
    Finetune(settings(data, tmp_path))
    shutil.copytree(run.out / "latents", tmp_path / "latents")
    Finetune(settings(data, tmp_path, steps=9))
    assert json.loads((tmp_path / "config.json").read_text())["transformer"]["steps"] == 9
    with pytest.raises(ValueError, match="seed: expected 0; got 1"):
        Finetune(with_changes(settings(data, tmp_path), {"seed": 1}))


def test_measuring_does_not_touch_the_recorded_settings(run, data):
    recorded = (run.out / "config.json").read_bytes()
    Finetune(FinetuneConfig(out=run.out, data=(data,), stage="measure", held_out_fraction=0.3))
    assert (run.out / "config.json").read_bytes() == recorded


def test_fine_tuning_takes_network_and_history_noise_from_the_start_model(data, tmp_path):
    start = make_model(sampler=SamplerConfig(history_noise=0.2), layers=2)
    start.save(tmp_path / "start", {})
    config = FinetuneConfig(
        out=tmp_path / "tuned", data=(data,), start=tmp_path / "start", held_out_fraction=0.3,
        transformer=TransformerTrainingConfig(steps=1, batch_size=2),
    )  # fmt: skip
    for stage in ("latents", "transformer"):
        assert Finetune(dataclasses.replace(config, stage=stage)).run()
    tuned = WorldModel.load(tmp_path / "tuned" / "model")
    assert tuned.transformer.config == start.transformer.config
    assert tuned.sampler.history_noise == 0.2
    recorded = json.loads((tmp_path / "tuned" / "config.json").read_text())["transformer"]
    assert (recorded["model"]["layers"], recorded["history_noise"]) == (2, 0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transformer.history_noise": 0.1}, r"transformer\.history_noise: expected 0\.2; got 0\.1"),
        ({"transformer.model": dataclasses.replace(TINY_TRANSFORMER, heads=4)}, r"model\.heads: expected 2; got 4"),
        (
            {"normalisation": "percentiles", "windows.mirror": False, "pose_format": "euler"},
            "pose_format: expected 'rotation_columns'; got 'euler'",
        ),
    ],
    ids=["history noise", "heads", "pose format"],
)
def test_another_network_than_the_start_models_is_refused(data, tmp_path, changes, message):
    make_model(sampler=SamplerConfig(history_noise=0.2)).save(tmp_path / "start", {})
    config = FinetuneConfig(out=tmp_path / "tuned", data=(data,), start=tmp_path / "start", held_out_fraction=0.3)
    with pytest.raises(ValueError, match=message):
        Finetune(with_changes(config, changes))
    assert not (tmp_path / "tuned").exists()


def test_a_model_that_a_kill_left_behind_its_checkpoint_is_written_again(run, copied, data):
    (copied / "model" / "config.json").unlink()
    assert Finetune(dataclasses.replace(settings(data, copied), stage="transformer")).run()
    assert WorldModel.load(copied / "model").sha256 == WorldModel.load(run.out / "model").sha256


def test_a_run_in_the_place_of_its_model_is_refused_with_where_the_model_is(run):
    with pytest.raises(ValueError, match=r"expected format 'worldserve-world-model-1'") as caught:
        WorldModel.load(run.out)
    assert str(caught.value).endswith(f"got None. Its model is in {run.out / 'model'}.")


def test_damaged_weights_are_refused(run, tmp_path):
    shutil.copytree(run.out / "model", tmp_path / "model")
    with (tmp_path / "model" / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="hash"):
        WorldModel.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 2}, r"transformer weights: expected .* missing \(wan\.blocks\.1\."),
        ({"spatial_action_channels": 0}, r"transformer weights: .* unknown \(spatial_action\.0\.bias, "),
        ({"ffn_dimensions": 32}, r"transformer weights: .* of another shape \(wan\.blocks\.0\.ffn\."),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_weights_of_another_network_are_refused(run, tmp_path, change, said):
    shutil.copytree(run.out / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["transformer"] |= change
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=said) as caught:
        WorldModel.load(tmp_path / "model")
    assert str(caught.value).startswith(f"{tmp_path / 'model'}: ")
    assert "train the model again with `worldserve finetune-wm`" in str(caught.value)


def test_a_checkpoint_that_does_not_fit_is_said_in_a_line(data, tmp_path, capsys):
    start = make_model()
    start.save(tmp_path / "start", {})
    options = [
        "--data", str(data), "--start", str(tmp_path / "start"), "--out", str(tmp_path / "out"),
        "--held-out-fraction", "0.3", "--stage", "transformer", "--transformer.steps", "4",
        "--transformer.batch-size", "2", "--transformer.stop-after-cpu-s", "1e-9",
    ]  # fmt: skip
    assert main(options) == 0
    path = tmp_path / "out" / "checkpoint" / "optimizer.safetensors"
    state = load_file(str(path))
    save_file({**state, "model.place/exp_avg": torch.zeros(3)}, str(path))
    capsys.readouterr()
    assert main(options) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(
        f"worldserve finetune-wm: {path}: exp_avg of model.place: expected the shape (2, 1, 2, 4)"
    )
    assert "another --out" in said[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"windows.starts": (0, 40, 80)}, r"windows\.starts: expected 0 50 100 .*draft_width.*got \(0, 40, 80\)"),
        ({"windows.starts": (0, 100)}, r"windows\.starts: .*every chunk before; got \(0, 100\)"),
        ({"windows.starts": (50, 100)}, r"windows\.starts: .*got \(50, 100\)"),
        ({"windows.random_starts": 2}, r"windows\.random_starts: expected 0 with a draft .*got 2"),
        (
            {"pose_format": "euler", "windows.mirror": False, "normalisation": "percentiles"},
            r"pose_format: expected rotation_columns with a draft .*got euler",
        ),
    ],
    ids=["other chunks", "a chunk left out", "no first chunk", "random starts", "euler"],
)
def test_settings_that_a_draft_cannot_work_with_are_refused(data, tmp_path, changes, said):
    plain = with_changes(settings(data, tmp_path / "out"), changes)
    with pytest.raises(ValueError, match=said):
        with_changes(plain, {"transformer.model.draft_width": 8})
    make_model(draft_width=8).save(tmp_path / "start", {})
    with pytest.raises(ValueError, match=said if "pose_format" not in changes else "pose_format: expected"):
        Finetune(dataclasses.replace(plain, start=tmp_path / "start"))
    assert not (tmp_path / "out").exists()


def test_settings_that_a_draft_works_with(data, tmp_path):
    changes = {"transformer.model.draft_width": 8, "windows.starts": (0, 50), "windows.mirror": False}
    assert with_changes(settings(data, tmp_path), changes).windows.starts == (0, 50)


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


def test_sampling_shares(run):
    windows, _ = run.latents()
    shares = windows.probabilities({0: 0.25, 50: 0.75}, failure_fraction=0.8)
    by_start = {t: sum(p for p, row in zip(shares, windows.rows) if row["t"] == t) for t in (0, 50, 100, 150)}
    assert by_start == pytest.approx({0: 0.25, 50: 0.75, 100: 0.0, 150: 0.0})
    assert sum(p for p, row in zip(shares, windows.rows) if not row["success"]) == pytest.approx(0.8)


def test_a_run_of_an_older_version_goes_on(copied, data):
    """Its config.json names neither a gate nor data weights."""
    recorded = json.loads((copied / "config.json").read_text())
    for name in ("gate", "device", "precision", "reward"):
        del recorded[name]
    del recorded["transformer"]["data_weights"]
    (copied / "config.json").write_text(json.dumps(recorded))
    assert Finetune(settings(data, copied)).training


def test_a_start_model_replaced_at_its_path_is_refused(data, tmp_path):
    make_model(seed=1).save(tmp_path / "start", {})
    config = dataclasses.replace(settings(data, tmp_path / "out"), start=tmp_path / "start", stage="latents")
    for _ in range(2):
        assert Finetune(config).run()
    recorded = json.loads((tmp_path / "out" / "inputs.json").read_text())
    assert recorded["start.model_sha256"] == WorldModel.load(tmp_path / "start").sha256
    make_model(seed=2).save(tmp_path / "start", {})
    with pytest.raises(ValueError, match=r"other models or episodes .*\n  start\.model_sha256: expected"):
        Finetune(config)
    assert json.loads((tmp_path / "out" / "inputs.json").read_text()) == recorded


def test_windows_know_their_directory(run, data):
    windows, _ = run.latents()
    assert set(directory_of_episodes([data]).values()) == {0}
    found = mixed_probabilities(windows, {50: 1.0}, 0.5, directory_of_episodes([data]), (2.0,))
    np.testing.assert_allclose(found, windows.probabilities({50: 1.0}, 0.5))


def test_one_weight_a_directory(data, tmp_path):
    with pytest.raises(ValueError, match="each of the 1 --data directories; got 2"):
        settings(data, tmp_path, data_weights=(1.0, 2.0))


@pytest.mark.parametrize(
    ("fraction", "message"),
    [
        (
            1e-6,
            r"expected episodes to validate with; got none: of the 6 initial states .* 0 are held out .* raise --held",
        ),
        (
            1 - 1e-6,
            r"expected episodes to train on; got none: of the 6 initial states .* 6 are held out .* lower --held",
        ),
    ],
)
def test_data_without_a_side_are_refused_before_anything_is_trained(data, tmp_path, fraction, message):
    with pytest.raises(ValueError, match=message):
        Finetune(dataclasses.replace(settings(data, tmp_path / "out"), held_out_fraction=fraction))
    assert not (tmp_path / "out").exists()


def test_clipped_poses_are_said(run, data, tmp_path, capsys):
    """A model that was made with the expert's percentiles cannot see where other episodes go; the run says so."""
    narrow = PoseStatistics(np.full(20, -0.1, np.float32), np.full(20, 0.1, np.float32))
    start = WorldModel.load(run.out / "model")
    start.statistics = narrow
    start.save(tmp_path / "start", {})
    config = dataclasses.replace(settings(data, tmp_path / "out"), start=tmp_path / "start", stage="transformer")
    assert Finetune(config).run()
    assert "of the poses' numbers are clipped" in capsys.readouterr().err
    card = json.loads((tmp_path / "out" / "model" / "config.json").read_text())["card"]
    assert card["clipped_pose_share"] > 0.5
