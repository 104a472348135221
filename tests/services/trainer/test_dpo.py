"""DPO: the loss by hand, which episodes are paired, and a policy that learns what was preferred."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import dpo
from services.trainer.dpo_config import DPOConfig
from services.trainer.preferences import RecordedDecisions, make_pairs, read_episodes, read_store
from services.trainer.replay_store import MemoryStore, StoredEpisode, StoredInfo
from services.trainer.run_record import RunRecord, read_jsonl
from worldserve.episodes import Episode, EpisodeWriter, SealedStateError


def config_of(out: Path = Path("unused"), **changes: Any) -> DPOConfig:
    values: dict[str, Any] = {
        "out": out, "epochs": 2, "batch_size": 4, "microbatch_size": 2, "learning_rate": 1e-3, "beta": 10.0,
        "validation_share": 0.25, "trainable": "all",
    }  # fmt: skip
    return DPOConfig(**{**values, **changes})


def data_of(states: int = 4, each: int = 4, value: float = 0.5) -> RecordedDecisions:
    """Successes move every joint to `value`, failures to its opposite; two decisions of ten actions."""
    count = states * each
    random = np.random.default_rng(0)
    succeeded = np.arange(count) % 2 == 0
    actions = np.where(succeeded, value, -value).astype(np.float32)[:, None, None, None]
    return RecordedDecisions(
        random.integers(0, 256, (count, 2, 16, 16, 3), np.uint8),
        random.normal(0, 0.1, (count, 2, 14)).astype(np.float32),
        np.broadcast_to(actions, (count, 2, 10, 14)).copy(),
        succeeded,
        ["go"] * count,
        [f"task/train/{number // each}" for number in range(count)],
        [f"e/{number}" for number in range(count)],
    )


# The loss ----------------------------------------------------------------------------------------------------------


def errors(chosen: list[float], rejected: list[float]) -> dpo.Errors:
    return dpo.Errors(torch.tensor([chosen]), torch.tensor([rejected]))


def test_logits_by_hand() -> None:
    policy, reference = errors([0.1, 0.5], [0.9, 0.2]), errors([0.3, 0.4], [0.4, 0.3])
    # Chosen: -0.2, +0.1; rejected: +0.5, -0.1; margins -0.7, +0.2; times -beta / 2 = -5.
    decisions = dpo.preference_logits(policy, reference, 10.0, "decision")
    assert decisions[0].tolist() == pytest.approx([3.5, -1.0])
    assert dpo.preference_logits(policy, reference, 10.0, "episode")[0].tolist() == pytest.approx([2.5])
    expected = -(math.log(1 / (1 + math.exp(-3.5))) + math.log(1 / (1 + math.exp(1.0)))) / 2
    assert float(dpo.dpo_loss(decisions)) == pytest.approx(expected, rel=1e-5)


def test_a_policy_that_is_its_reference_has_loss_log_two_and_prefers_nothing(tiny_policy: Any) -> None:
    learner = dpo.Learner(tiny_policy(), data_of(), config_of())
    policy, reference, logits = learner.compare(np.array([[0, 1]]), torch.Generator().manual_seed(0))
    metrics = dpo.preference_metrics(policy, reference, logits.detach(), 10.0)
    assert metrics["dpo/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert metrics["rewards/margins"] == pytest.approx(0.0, abs=1e-4)


def test_chosen_and_rejected_meet_the_same_noise_and_times(tiny_policy: Any) -> None:
    """An episode beside itself is never preferred, whatever the policy has become."""
    learner = dpo.Learner(tiny_policy(), data_of(), config_of())
    with torch.no_grad():
        for value in learner.policy.expert_parameters():
            value.add_(0.05)
    _, _, logits = learner.compare(np.array([[0, 0], [3, 3]]), torch.Generator().manual_seed(0))
    assert torch.allclose(logits, torch.zeros_like(logits), atol=1e-4)


def test_the_chosen_actions_get_nearer_and_the_rejected_ones_farther(tiny_policy: Any) -> None:
    policy, data = tiny_policy(), data_of()
    learner = dpo.Learner(policy, data, config_of())
    pairs = make_pairs(data, 2, np.random.default_rng(0))
    for step in range(30):
        metrics = learner.step(pairs[:4], torch.Generator().manual_seed(step))
    assert metrics["rewards/accuracies"] == 1.0
    assert metrics["rewards/chosen"] > 0.0 > metrics["rewards/rejected"]
    observation, _ = data.batch(np.arange(8), (0,))
    before, after = (
        item.act(observation, [torch.Generator().manual_seed(n) for n in range(8)], "mean")
        for item in (learner.reference, policy)
    )
    assert float(after.actions.mean()) > float(before.actions.mean()) + 0.02  # successes moved to + 0.5


def test_the_reference_and_what_is_not_trained_stay_as_they_were(tiny_policy: Any) -> None:
    policy, data = tiny_policy(), data_of()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    learner = dpo.Learner(policy, data, config_of(trainable="expert"))
    learner.step(np.array([[0, 1], [2, 3]]), torch.Generator().manual_seed(0))
    changed = {n.split(".")[0] for n, value in policy.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == {"expert"}
    for name, value in learner.reference.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_flow_matching_errors_of_several_draws_are_those_of_one_at_a_time(tiny_policy: Any) -> None:
    policy, data = tiny_policy(), data_of()
    observation, actions = data.batch(np.array([0, 5]), (0, 1))
    generator = torch.Generator().manual_seed(0)
    noise, times = (
        policy.flow_noise((3 * 4, 10, 14), generator).unflatten(0, (3, 4)),
        torch.rand(3, 4, generator=generator),
    )
    together = policy.flow_matching_errors(observation, actions, noise, times)
    for draw in range(3):
        alone = policy.flow_matching_errors(observation, actions, noise[draw : draw + 1], times[draw : draw + 1])
        assert torch.allclose(together[draw], alone[0], rtol=1e-4, atol=1e-5)


# Pairs -------------------------------------------------------------------------------------------------------------


def with_outcomes(table: dict[str, str]) -> RecordedDecisions:
    """State -> outcomes, "1" or "0" an episode."""
    rows = [(state, mark) for state, marks in table.items() for mark in marks]
    count = len(rows)
    return RecordedDecisions(
        np.zeros((count, 1, 2, 2, 3), np.uint8),
        np.zeros((count, 1, 14), np.float32),
        np.zeros((count, 1, 10, 14), np.float32),
        np.array([mark == "1" for _, mark in rows]),
        ["go"] * count,
        [state for state, _ in rows],
        [str(number) for number in range(count)],
    )


def test_pairs_are_a_success_and_a_failure_of_one_state() -> None:
    data = with_outcomes({"a": "110", "b": "111", "c": "0", "d": "01"})
    pairs = make_pairs(data, 8, np.random.default_rng(0)).tolist()
    assert sorted(pairs) == [[0, 2], [1, 2], [8, 7]]


@pytest.mark.parametrize("marks", ["1111100", "1100000", "1010"])
def test_capped_pairs_use_every_episode_before_one_is_used_twice(marks: str) -> None:
    data = with_outcomes({"a": marks})
    ones, zeros = marks.count("1"), marks.count("0")
    all_pairs = make_pairs(data, 99, np.random.default_rng(0))
    assert len({tuple(pair) for pair in all_pairs.tolist()}) == len(all_pairs) == ones * zeros
    capped = make_pairs(data, max(ones, zeros), np.random.default_rng(0))
    assert len(set(capped[:, 0])) == ones
    assert len(set(capped[:, 1])) == zeros


def test_no_state_is_trained_and_validated_on() -> None:
    data = data_of(states=8)
    pairs = make_pairs(data, 4, np.random.default_rng(0))
    training, validation = dpo.split_states(data, pairs, 0.25, np.random.default_rng(0))
    states = [{data.initial_state_ids[chosen] for chosen, _ in part} for part in (training, validation)]
    assert not states[0] & states[1]
    assert (len(states[0]), len(states[1])) == (6, 2)
    assert len(training) + len(validation) == len(pairs)


# Where episodes come from ------------------------------------------------------------------------------------------


def record(writer: EpisodeWriter, number: int, state: str, success: bool) -> None:
    actions = np.full((20, 14), number / 10, np.float32)
    frames = np.arange(21, dtype=np.uint8)[:, None, None, None].repeat(16, 1).repeat(16, 2).repeat(3, 3) + number
    states = np.arange(21, dtype=np.float32)[:, None].repeat(14, 1)
    writer.append(
        Episode(
            episode_id=f"e/{number}", initial_state_id=state, seed=0, instruction="go", requested_actions=actions,
            executed_actions=actions, proprioception=states, rewards=np.zeros(20, np.float32), success=success,
            frame_source=frames.astype(np.uint8),
        )
    )  # fmt: skip


def test_recorded_episodes_give_what_the_policy_saw_and_did(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path) as writer:
        for number, (state, success) in enumerate(
            [("task/train/0", True), ("task/train/0", False), ("task/train/1", True)]
        ):
            record(writer, number, state, success)
    data = read_episodes([tmp_path], "success", 10)
    assert data is not None
    assert list(data.episode_ids) == ["e/0", "e/1"]  # the third has nobody to be compared with
    assert data.images[1, :, 0, 0, 0].tolist() == [1, 11]  # frames 0 and 10
    assert data.states[0, :, 0].tolist() == [0.0, 10.0]
    assert data.actions.shape == (2, 2, 10, 14)
    assert data.succeeded.tolist() == [True, False]
    assert read_episodes([tmp_path], "verdict", 10) is None  # none was judged


def test_episodes_of_test_states_are_refused(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path) as writer:
        record(writer, 0, "task/test/0", True)
    with pytest.raises(SealedStateError):
        read_episodes([tmp_path], "success", 10)


def test_stored_episodes_give_the_same_and_keyframe_starts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    monkeypatch.setattr("services.trainer.replay_store.open_store", lambda where: store)
    for index, (success, acted) in enumerate([(1, [True, True]), (0, [True, True]), (0, [False, True])]):
        info = StoredInfo(
            run="r", iteration=0, index=index, initial_state_id="task/train/0", environment_seed=0, instruction="go",
            success=success, verdict=1 - success, verdict_peak=0.5, reward_source="success", policy_version="p",
            model_version="m", interface="i",
        )  # fmt: skip
        arrays = {
            "images": np.full((2, 16, 16, 3), index, np.uint8),
            "states": np.zeros((2, 14), np.float32),
            "executed_actions": np.full((2, 10, 14), index, np.float32),
            "acted": np.array(acted),
        }
        store.append([StoredEpisode(info, arrays)])
    data = read_store("memory", "success", "i")
    assert data is not None
    assert (list(data.episode_ids), data.succeeded.tolist()) == (["r/0/0", "r/0/1"], [True, False])
    judged = read_store("memory", "verdict", "i")
    assert judged is not None
    assert judged.succeeded.tolist() == [False, True]
    with pytest.raises(ValueError, match="store: expected episodes of interface other"):
        read_store("memory", "success", "other")


# Whole runs --------------------------------------------------------------------------------------------------------


def train(policy: Any, config: DPOConfig, data: RecordedDecisions) -> list[dict[str, Any]]:
    run = RunRecord(config.out, {}, config.resume)
    try:
        dpo.train(policy, data, config, run)
    finally:
        run.close()
    return read_jsonl(config.out / "metrics.jsonl")


@pytest.mark.parametrize("unit", ["decision", "episode"])
def test_a_run_learns_preferences_that_hold_on_states_it_did_not_see(
    tiny_policy: Any, tmp_path: Path, unit: str
) -> None:
    rows = train(tiny_policy(), config_of(tmp_path, epochs=4, unit=unit), data_of(states=8))
    assert rows[-1]["validation/rewards/accuracies"] == 1.0
    assert rows[-1]["validation/dpo/loss"] < rows[0]["validation/dpo/loss"]
    assert rows[-1]["dpo/validation_pairs"] == 2 * 4


def test_a_resumed_run_equals_an_uninterrupted_one(tiny_policy: Any, tmp_path: Path) -> None:
    whole, data = tiny_policy(), data_of()
    rows = train(whole, config_of(tmp_path / "whole", epochs=3), data)
    train(tiny_policy(), config_of(tmp_path / "cut", epochs=1), data)
    resumed = tiny_policy()
    again = train(resumed, config_of(tmp_path / "cut", epochs=3, resume=True), data)
    timeless = [[{k: v for k, v in row.items() if not k.startswith("time/")} for row in part] for part in (rows, again)]
    assert timeless[0] == timeless[1]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_without_a_pair_to_train_on_the_run_says_what_to_do(tiny_policy: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Record more episodes a state, or lower --validation-share"):
        train(tiny_policy(), config_of(tmp_path), with_outcomes({"a": "11"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.0}, "beta: expected a positive number"),
        ({"validation_share": 1.0}, "validation_share"),
        ({"decisions": (1, 1)}, "decisions: expected some from 0 on, each once"),
        ({"sft_weight": -1.0}, "sft_weight"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**changes)


def test_decisions_that_the_episodes_do_not_have_are_refused(tiny_policy: Any) -> None:
    with pytest.raises(ValueError, match="decisions: expected some of 0 to 1"):
        dpo.Learner(tiny_policy(), data_of(), config_of(decisions=(0, 2)))
