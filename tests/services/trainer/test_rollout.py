"""Rollouts: the same bytes whatever the batch, retries without double steps, failures reported, nothing left open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import calls
from services.trainer.calls import MAX_RETRIES
from services.trainer.plans import plan_episodes
from services.trainer.rollout import EpisodeRecord, RolloutError, collect_rollout
from worldserve.messages import ItemFailedError

STATES = [f"task/train/{n}" for n in range(7)]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls.time, "sleep", lambda seconds: None)


def _collect(client: Any, policy: Any, batch: int = 4, **options: Any) -> Any:
    settings = {"iteration": 2, "policy_batch": 4, **options}
    return collect_rollout(client, policy, STATES, 5, "success", "sample", batch, **settings)


def test_arrays_have_an_episode_a_row_and_a_decision_a_column(bandit: Any, tiny_policy: Any) -> None:
    client = bandit()
    result = _collect(client, tiny_policy())
    assert result.images.shape == (7, 2, 16, 16, 3)
    assert result.samples["actions"].shape == (7, 2, 10, 14)
    assert result.values.shape == (7, 2)
    assert result.terminated.tolist() == [[False, True]] * 7
    assert result.rewards[:, 0].tolist() == [0.0] * 7
    assert result.rewards[:, 1].tolist() == result.success.tolist() == result.verdict.tolist()
    for row, state in enumerate(STATES):
        assert result.plans[row].initial_state_id == state
        assert (result.images[row, 0] == client.frame(state, 0)).all()
        assert (result.images[row, 1] == client.frame(state, 10)).all()
        assert (result.final_images[row] == client.frame(state, 20)).all()
    assert torch.equal(torch.from_numpy(result.states[:, 1]), result.samples["actions"][:, 0, -1])
    assert client.open_episodes == set()


@pytest.mark.parametrize(("batch", "overlap"), [(1, True), (3, True), (7, False), (64, True)])
def test_batching_changes_no_bit(bandit: Any, tiny_policy: Any, batch: int, overlap: bool) -> None:
    policy = tiny_policy()
    first, other = _collect(bandit(), policy), _collect(bandit(), policy, batch, overlap=overlap)
    assert (first.images == other.images).all()
    for name, value in first.samples.items():
        assert torch.equal(value, other.samples[name]), name


def test_randomness_is_a_function_of_seed_iteration_and_episode() -> None:
    def draw(seed: int, iteration: int, index: int) -> tuple[float, int]:
        plan = plan_episodes(STATES, seed, iteration, "run")[index]
        return float(torch.rand((), generator=plan.policy_generator())), plan.environment_seed

    draws = {(s, i, e): draw(s, i, e) for s in (0, 1) for i in (0, 1) for e in (0, 1)}
    assert len({noise for noise, _ in draws.values()}) == 8
    assert len({seed for _, seed in draws.values()}) == 8
    assert draws == {key: draw(*key) for key in draws}


def test_unavailable_items_are_retried_and_change_nothing(bandit: Any, tiny_policy: Any) -> None:
    policy, flaky = tiny_policy(), bandit(unavailable={1: 1, 6: MAX_RETRIES})
    calm, retried = _collect(bandit(), policy), _collect(flaky, policy)
    assert retried.failures == []
    assert torch.equal(calm.samples["actions"], retried.samples["actions"])
    assert len(flaky.steps) == 14


def test_an_episode_that_stays_unavailable_is_reported_and_the_others_finish(bandit: Any, tiny_policy: Any) -> None:
    result = _collect(bandit(unavailable={2: 1000}), tiny_policy())
    assert [plan.index for plan in result.plans] == [0, 1, 3, 4, 5, 6]
    assert [(f.plan.index, f.chunk_index, f.error.code) for f in result.failures] == [(2, 0, "UNAVAILABLE")]
    assert len(result.images) == len(result.rewards) == 6


def test_an_error_that_retrying_cannot_cure_raises_and_leaves_nothing_open(bandit: Any, tiny_policy: Any) -> None:
    client = bandit(unavailable={2: 1}, code="FAILED_PRECONDITION")
    with pytest.raises(ItemFailedError, match="FAILED_PRECONDITION"):
        _collect(client, tiny_policy())
    assert client.open_episodes == set()


def test_a_target_without_ground_truth_is_told_apart(bandit: Any, tiny_policy: Any) -> None:
    with pytest.raises(RolloutError, match="--reward-source verdict"):
        _collect(bandit(gives_success=False), tiny_policy())
    result = collect_rollout(bandit(gives_success=False), tiny_policy(), STATES, 5, "verdict", "mean", 4)
    assert result.success.tolist() == [-1] * 7
    assert result.rewards.sum() == result.verdict.sum()


def test_recorded_episodes_hold_every_frame_and_both_actions(bandit: Any, tiny_policy: Any) -> None:
    records: list[EpisodeRecord] = []
    client = bandit()
    result = _collect(client, tiny_policy(), on_episode=records.append)
    assert len(records) == 7
    for record, state in zip(records, STATES):
        assert record.plan.initial_state_id == state
        assert record.frames.shape == (21, 16, 16, 3)
        expected = np.stack([client.frame(state, index) for index in range(21)])
        assert (record.frames == expected).all()
        assert (record.executed_actions == record.requested_actions.clip(-1, 1)).all()
    assert (result.images[:, 1] == np.stack([record.frames[10] for record in records])).all()
