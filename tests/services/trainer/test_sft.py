"""Imitation: pairs, statistics, learning, plateau, resuming."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from services.trainer.demonstrations import (
    DemonstrationArrays,
    action_statistics,
    choose_successes,
    chunk_batch,
    draw_batch,
)
from services.trainer.policies import FlowPolicy, PolicyObservation, flow_mini, load_policy
from services.trainer.run_record import RunRecord
from services.trainer.sft import SFTTrainer
from services.trainer.sft_config import SFTConfig

STEPS, CHUNK = 40, 10


def demonstrations(count: int, seed: int = 0, stride: int = 1) -> DemonstrationArrays:
    """A square whose column says how far joint 0 shall move in 10 actions; everything else stays."""
    random = np.random.default_rng(seed)
    frames = np.full((count, STEPS // stride + 1, 32, 32, 3), 90, np.uint8)
    states = np.zeros((count, STEPS + 1, 14), np.float32)
    for episode in range(count):
        column = int(random.integers(2, 24))
        frames[episode, :, 12:20, column : column + 6] = (240, 60, 30)
        states[episode, :, 0] = np.minimum(np.arange(STEPS + 1) / CHUNK, 1.0) * (column - 13) / 20
    states[..., [6, 13]] = 1.0
    names = [f"episode {index}" for index in range(count)]
    return DemonstrationArrays(frames, states, states[:, 1:], ["move"] * count, names, stride)


def fresh_policy(training: DemonstrationArrays) -> FlowPolicy:
    config = flow_mini(
        image_height=32, image_width=32, chunk_actions=CHUNK, vision_width=32, vision_mlp_width=48, prefix_width=32,
        prefix_mlp_width=48, expert_width=32, expert_mlp_width=48, layers=2, heads=2, key_value_heads=2, head_width=16,
    )  # fmt: skip
    policy = FlowPolicy(config, seed=0)
    policy.set_statistics(*action_statistics(training, CHUNK, config.gripper_dimensions))
    return policy


def trainer(out: Path, resume: bool = False, **changes: object) -> SFTTrainer:
    settings: dict[str, object] = {
        "out": out, "batch_size": 16, "draws": 2, "evaluate_every": 10, "warmup_steps": 5, "max_steps": 20,
        "ema_decay": 0.95, "learning_rate": 3e-3,
    }  # fmt: skip
    config = SFTConfig(**{**settings, **changes})  # type: ignore[arg-type]
    training = demonstrations(40)
    return SFTTrainer(
        config, training, demonstrations(8, seed=1), fresh_policy(training), RunRecord(out, {}, resume), {}
    )


def test_pairs_start_at_t_and_end_in_padding():
    data = demonstrations(3)
    batch = chunk_batch(data, np.array([2, 0]), np.array([0, 35]), CHUNK)
    assert torch.equal(batch.actions[0], torch.from_numpy(data.actions[2, :10]))
    assert torch.equal(batch.actions[1, :5], torch.from_numpy(data.actions[0, 35:]))
    assert torch.equal(batch.actions[1, 5:], torch.from_numpy(data.actions[0, -1]).expand(5, 14))
    assert batch.action_is_pad.tolist() == [[False] * 10, [False] * 5 + [True] * 5]
    assert torch.equal(batch.observation.state[1], torch.from_numpy(data.states[0, 35]))


def test_strided_frames_pair_with_their_own_states():
    every, fifth = demonstrations(2), demonstrations(2, stride=5)
    starts = np.array([15, 30])
    assert torch.equal(
        chunk_batch(every, np.array([0, 1]), starts, CHUNK).observation.images,
        chunk_batch(fifth, np.array([0, 1]), starts, CHUNK).observation.images,
    )
    drawn = draw_batch(fifth, 64, CHUNK, 0.0, 0.0, np.random.default_rng(0)).observation.state[:, 0].abs()
    assert len(drawn.unique()) > 4


def test_shares_decide_where_pairs_start():
    data = demonstrations(5)
    random = np.random.default_rng(0)
    assert not draw_batch(data, 200, CHUNK, 0.0, 1.0, random).action_is_pad.any()
    assert not draw_batch(data, 200, CHUNK, 1.0, 0.0, random).observation.state[:, 0].any()
    assert draw_batch(data, 200, CHUNK, 0.0, 0.0, random).action_is_pad.any()


def test_statistics_are_of_deltas_and_absolute_grippers():
    data = demonstrations(40)
    state_mean, state_std, action_mean, action_std = action_statistics(data, CHUNK, (6, 13))
    windows = np.stack(
        [data.actions[:, t : t + CHUNK, 0] - data.states[:, t, None, 0] for t in range(STEPS - CHUNK + 1)]
    )
    assert action_mean[0].item() == pytest.approx(float(windows.mean()), abs=1e-6)
    assert action_std[0].item() == pytest.approx(float(windows.std()), abs=1e-6)
    assert action_mean[6].item() == 1.0
    assert action_std[6].item() == pytest.approx(0.02)  # constant: the floor
    assert state_mean[13].item() == 1.0
    assert state_std[1].item() == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("success", "every", "positions"),
    [("1111", 1, [0, 1, 2, 3]), ("1111", 2, [0, 2]), ("0110111", 2, [1, 4, 6]), ("0000", 1, []), ("11111", 3, [0, 3])],
)
def test_every_nth_success_counts_and_failures_do_not(success, every, positions):
    assert choose_successes([mark == "1" for mark in success], every) == positions


def test_the_policy_learns_where_the_square_is(tmp_path):
    run = trainer(tmp_path / "run", max_steps=150, evaluate_every=150)
    before = run.evaluate()
    assert run.run() == "max_steps"
    policy = load_policy(tmp_path / "run" / "policy")
    data = demonstrations(30, seed=5)
    observation = PolicyObservation(
        torch.from_numpy(data.frames[:, 0]), torch.from_numpy(data.states[:, 0]), data.instructions
    )
    acted = policy.act(observation, [torch.Generator().manual_seed(i) for i in range(30)], "mean").actions[:, -1, 0]
    wanted = torch.from_numpy(data.actions[:, CHUNK - 1, 0])
    assert torch.corrcoef(torch.stack([acted, wanted]))[0, 1] > 0.7
    assert run.evaluate()["validation_loss"] < 0.5 * before["validation_loss"]


def test_an_interrupted_run_goes_on_to_the_same_weights(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.run()
    trainer(tmp_path / "halves", max_steps=10).run()
    second = trainer(tmp_path / "halves", resume=True)
    assert second.resume()
    assert second.progress.step == 10
    second.run()
    for name, value in whole.policy.state_dict().items():
        assert torch.equal(value, second.policy.state_dict()[name]), name
    rows = [json.loads(line) for line in (tmp_path / "halves" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [9, 19]
    assert len(list((tmp_path / "halves" / "checkpoints").iterdir())) == 1


def test_a_plateau_lowers_the_learning_rate_and_then_ends_the_run(tmp_path):
    run = trainer(
        tmp_path / "run", max_steps=10_000, evaluate_every=1, patience=2, learning_rate_decays=1, learning_rate=0.0
    )
    assert run.run() == "plateau"
    assert run.progress.decays == 2
    card = json.loads((tmp_path / "run" / "policy" / "card.json").read_text())
    assert card["ended"] == "plateau"


def test_a_diverged_loss_stops_the_run(tmp_path):
    run = trainer(tmp_path / "run")
    with torch.no_grad():
        run.policy.expert.action_out_proj.bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="step 0"):
        run.run()


def test_wrong_arrays_are_refused_by_name():
    data = demonstrations(2)
    with pytest.raises(ValueError, match="states"):
        dataclasses.replace(data, states=data.states[:, :-1])
    with pytest.raises(ValueError, match="actions"):
        dataclasses.replace(data, actions=data.actions * np.float32(np.nan))
