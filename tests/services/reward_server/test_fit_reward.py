"""Fitting, from recorded episodes to figures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from services.reward_server import rounds
from services.reward_server.fit_reward import FitRewardConfig, main, run, split_by_state
from services.reward_server.measure import wilson
from services.reward_server.training import TrainingSettings

SETTINGS = TrainingSettings(rounds=2, steps_per_round=25, batch=32, ghosts=8, learning_rate=2e-3)
BRIEF = TrainingSettings(rounds=2, steps_per_round=3, batch=8, ghosts=4)


def config_for(tmp_path: Path, directory: Path, **changes: object) -> FitRewardConfig:
    values = {
        "data": (directory,),
        "out": tmp_path / "reward",
        "work": tmp_path / "work",
        "training": SETTINGS,
        **changes,
    }
    return FitRewardConfig(**{"frame_stride": 10, **values})  # type: ignore[arg-type]


def test_a_fitted_model_tells_lifted_from_not_quite(tmp_path: Path, blocks: Path, other_blocks: Path) -> None:
    figures = run(config_for(tmp_path, blocks, measure=(other_blocks,)))
    assert figures["validation"]["fake_success"] <= 0.03
    assert figures["validation"]["recall"] == 1.0
    assert figures["held_out"]["fake_success"]["value"] == 0.0
    assert figures["held_out"]["recall"]["value"] == 1.0
    card = (tmp_path / "reward" / "card.md").read_text()
    assert "held out" in card
    assert str(blocks) in card
    rows = [json.loads(line) for line in (tmp_path / "work" / "held_out.jsonl").read_text().splitlines()]
    assert [row["verdict"] for row in rows] == [row["success"] for row in rows]
    assert all(90 <= row["peak_frame_index"] <= 200 for row in rows if row["success"])

    weights = (tmp_path / "reward" / "model.safetensors").read_bytes()
    again = run(config_for(tmp_path, blocks, data=(), measure=(other_blocks,)))
    assert again["held_out"]["recall"] == figures["held_out"]["recall"]
    assert (tmp_path / "reward" / "model.safetensors").read_bytes() == weights
    with pytest.raises(ValueError, match="not fitted on"):
        run(config_for(tmp_path, blocks, data=(), measure=(blocks,)))
    with pytest.raises(ValueError, match="other data or settings"):
        run(config_for(tmp_path, blocks, resume=True, seed=1))


def test_a_run_cut_off_between_rounds_gives_the_same_weights(
    tmp_path: Path, blocks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config_for(tmp_path / "whole", blocks, max_fake_success=0.9, training=BRIEF))
    save = rounds.save

    def interrupted(*arguments: Any) -> None:
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(rounds, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(config_for(tmp_path / "cut", blocks, max_fake_success=0.9, training=BRIEF))
    with pytest.raises(ValueError, match=r"resume: .* is of other data or settings"):
        run(config_for(tmp_path / "cut", blocks, resume=True, max_fake_success=0.8, training=BRIEF))
    run(config_for(tmp_path / "cut", blocks, resume=True, max_fake_success=0.9, training=BRIEF))
    whole, cut = (load_file(str(tmp_path / name / "reward" / "model.safetensors")) for name in ("whole", "cut"))
    assert all(np.array_equal(whole[name], cut[name]) for name in whole)
    rows = (tmp_path / "cut" / "work" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["round"] for row in rows] == [0, 1]


def test_states_are_on_one_side() -> None:
    states = [f"adjust_bottle/train/{index % 20:04d}" for index in range(60)] + ["adjust_bottle/validation/0001"]
    train, validation = split_by_state(states, 0.3, seed=0)
    assert sorted([*train, *validation]) == list(range(61))
    assert {states[i] for i in train}.isdisjoint({states[i] for i in validation})
    assert 60 in validation
    assert 0 < len(validation) < 40


def test_sealed_test_states_are_refused() -> None:
    with pytest.raises(ValueError, match="sealed for testing"):
        split_by_state(["adjust_bottle/test/0003"], 0.2, 0)


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    [(0, 150, 0.0, 0.0177), (150, 150, 0.9823, 1.0), (75, 150, 0.4333, 0.5667)],
)
def test_wilson_intervals(count: int, total: int, low: float, high: float) -> None:
    rate = wilson(count, total)
    assert (rate.low, rate.high) == (pytest.approx(low, abs=5e-4), pytest.approx(high, abs=5e-4))


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path / "nowhere")]) == 1
    assert "no data set here" in capsys.readouterr().err
    assert main([]) == 1
    assert "--data" in capsys.readouterr().err


def test_a_model_of_another_run_is_not_replaced_unasked(tmp_path: Path, blocks: Path, other_blocks: Path) -> None:
    brief = {"max_fake_success": 0.9, "training": BRIEF}
    run(config_for(tmp_path, blocks, **brief))
    model = tmp_path / "reward" / "model.safetensors"
    weights = model.read_bytes()
    for changes, name in (({"seed": 1}, "seed"), ({"data": (blocks, other_blocks)}, "data")):
        with pytest.raises(ValueError, match=rf"other data or settings:\n  {name}: expected .*\nGive another --out"):
            run(config_for(tmp_path, blocks, **{**brief, **changes}))
        assert model.read_bytes() == weights
    run(config_for(tmp_path, blocks, **brief))  # its own: the same command again
    run(config_for(tmp_path, blocks, **brief, seed=1, replace=True))
    assert model.read_bytes() != weights


def test_a_directory_that_holds_no_reward_model_is_left_alone(tmp_path: Path, blocks: Path) -> None:
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "notes.txt").write_text("mine")
    for replace in (False, True):
        with pytest.raises(ValueError, match="out: expected no directory yet, or that of a reward model"):
            run(config_for(tmp_path, blocks, replace=replace))
    assert (tmp_path / "reward" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "work").exists()


def test_the_default_is_not_the_model_that_is_shipped() -> None:
    assert FitRewardConfig().out == Path("runs/reward")
