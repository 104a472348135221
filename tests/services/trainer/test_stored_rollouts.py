"""Rollouts through a replay store: what is there is not run again, and only if it is what would be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import ppo
from services.trainer.plans import plan_episodes
from services.trainer.ppo_config import PPOConfig
from services.trainer.replay_store import MemoryStore
from services.trainer.rollout_arrays import Rollout
from services.trainer.run_record import RunRecord, read_jsonl
from services.trainer.stored_rollouts import RolloutCollector, StoredRun, policy_version, stored_run
from worldserve.contract import adjust_bottle, fingerprint

IDS = [f"task/train/{number}" for number in range(6)]


def config_of(out: Path = Path("unused"), **changes: Any) -> PPOConfig:
    values: dict[str, Any] = {
        "out": out, "iterations": 2, "episodes_per_iteration": 6, "batch": 2, "policy_batch": 2, "minibatch_size": 6,
        "microbatch_size": 6, "critic_warmup_iterations": 0, "reward_source": "success", "update_epochs": 1,
        "learning_rate": 1e-3, "noise_level": 0.5, "noise_steps": (0, 1),
    }  # fmt: skip
    return PPOConfig(**{**values, **changes})


def collect(client: Any, policy: Any, stored: StoredRun | None, iteration: int = 0, **changes: Any) -> Rollout:
    config = config_of(**changes)
    plans = plan_episodes(IDS, config.seed, iteration, f"wire-{id(client)}")
    return RolloutCollector(client, policy, config, "wire", stored).collect(plans, iteration)


def same(first: Rollout, second: Rollout) -> bool:
    arrays = ("images", "states", "final_images", "executed_actions", "rewards", "success", "verdict", "terminated",
              "acted", "first_success", "clipped_actions")  # fmt: skip
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in arrays) and all(
        torch.equal(value, second.samples[name]) for name, value in first.samples.items()
    )


def test_a_second_time_nothing_is_run_and_everything_is_the_same(bandit: Any, tiny_policy: Any) -> None:
    stored, client = StoredRun(MemoryStore(), "run"), bandit()
    first = collect(client, tiny_policy(), stored)
    assert len(client.resets) == 6
    fresh = bandit()
    again = collect(fresh, tiny_policy(), stored)
    assert fresh.resets == []
    assert same(first, again)
    assert same(first, collect(bandit(), tiny_policy(), None))  # and as without a store


def test_what_is_missing_is_run_and_takes_its_place(bandit: Any, tiny_policy: Any) -> None:
    stored = StoredRun(MemoryStore(), "run")
    first = collect(bandit(), tiny_policy(), stored)
    stored.store.drop(["run/0/1", "run/0/4"])
    client = bandit()
    again = collect(client, tiny_policy(), stored)
    assert [item.initial_state_id for item in client.resets] == [IDS[1], IDS[4]]
    assert [plan.index for plan in again.plans] == list(range(6))
    assert same(first, again)
    assert len(stored.store.infos()) == 6


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("nothing", False),
        ("policy", True),
        ("model", True),
        ("reward_source", True),
        ("iteration", True),
        ("run", True),
    ],
)
def test_episodes_of_another_policy_model_reward_iteration_or_run_are_not_taken(
    bandit: Any, tiny_policy: Any, what: str, changed: bool
) -> None:
    store = MemoryStore()
    collect(bandit(), tiny_policy(), StoredRun(store, "run", "model"))
    policy, client = tiny_policy(), bandit()
    if what == "policy":
        with torch.no_grad():
            policy.expert_parameters()[0].view(-1)[0] += 1e-3
    stored = StoredRun(store, "other" if what == "run" else "run", "other" if what == "model" else "model")
    source = "verdict" if what == "reward_source" else "success"
    collect(client, policy, stored, int(what == "iteration"), reward_source=source)
    assert len(client.resets) == (6 if changed else 0)


def test_a_policys_version_is_its_weights_and_settings(tiny_policy: Any) -> None:
    first, second = tiny_policy(), tiny_policy()
    assert policy_version(first) == policy_version(second)
    second.reconfigure(0, noise_level=0.4)
    assert policy_version(first) != policy_version(second)


def test_a_run_keeps_what_it_came_to(bandit: Any, tiny_policy: Any) -> None:
    stored = StoredRun(MemoryStore(), "run", "model", "interface")
    rollout = collect(bandit(), tiny_policy(), stored)
    for row, info in enumerate(stored.store.infos()):
        assert (info.success, info.verdict) == (rollout.success[row], rollout.verdict[row])
        assert (info.model_version, info.interface, info.reward_source) == ("model", "interface", "success")
        arrays = stored.store.read(info.episode_id).arrays
        assert np.array_equal(arrays["executed_actions"], rollout.executed_actions[row])
        assert np.array_equal(arrays["samples/log_probabilities"], rollout.samples["log_probabilities"][row].numpy())


def test_failed_episodes_are_not_stored_and_too_many_of_an_iteration_stop_the_run(
    bandit: Any, tiny_policy: Any
) -> None:
    stored = StoredRun(MemoryStore(), "run")
    rollout = collect(bandit(unavailable={3: 99}), tiny_policy(), stored, max_failed_fraction=0.5)
    assert [plan.index for plan in rollout.plans] == [0, 1, 2, 4, 5]
    assert [info.index for info in stored.store.infos()] == [0, 1, 2, 4, 5]
    with pytest.raises(RuntimeError, match=r"1 of 6 episodes failed, more than max_failed_fraction = 0\.1"):
        collect(bandit(unavailable={3: 99}), tiny_policy(), None, max_failed_fraction=0.1)


def test_a_resumed_ppo_run_takes_what_it_had_and_ends_as_an_uninterrupted_one(
    bandit: Any, tiny_policy: Any, tmp_path: Path
) -> None:
    def train(client: Any, policy: Any, config: PPOConfig, stored: StoredRun | None) -> list[dict[str, Any]]:
        record = RunRecord(config.out, {}, config.resume)
        try:
            ppo.train(client, policy, IDS, config, record, stored=stored)
        finally:
            record.close()
        return read_jsonl(config.out / "metrics.jsonl")

    whole_policy, resumed_policy = tiny_policy(), tiny_policy()
    train(bandit(), whole_policy, config_of(tmp_path / "whole"), None)
    stored = StoredRun(MemoryStore(), "run")
    with pytest.raises(ConnectionError):  # in the second iteration, after four of its episodes
        train(bandit(fail_after_resets=10), tiny_policy(), config_of(tmp_path / "cut"), stored)
    client = bandit()
    train(client, resumed_policy, config_of(tmp_path / "cut", resume=True), stored)
    assert len(client.resets) == 2
    for name, value in whole_policy.state_dict().items():
        assert torch.equal(value, resumed_policy.state_dict()[name]), name


def test_the_runs_name_is_unique_and_kept_for_a_resumed_run(tmp_path: Path) -> None:
    contract = adjust_bottle("simulator", "stub", {})
    with stored_run(config_of(tmp_path), "ppo", contract) as none:
        assert none is None
    names = []
    for resume in (False, True, False):
        with stored_run(config_of(tmp_path, store="memory", resume=resume), "ppo", contract) as stored:
            assert stored is not None
            names.append(stored.run)
            assert stored.model_version == fingerprint(contract.provenance)
    assert names[0] == names[1] != names[2]
