"""GRPO: which groups are learned from, which decisions carry loss, where groups start, and whole runs on a bandit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import grpo
from services.trainer.grpo_config import GRPOConfig
from services.trainer.keyframes import Start, load_keyframes
from services.trainer.plans import EpisodePlan
from services.trainer.recipes import load_recipe
from services.trainer.replay_store import MemoryStore
from services.trainer.rollout import collect_rollout
from services.trainer.run_record import RunRecord, read_jsonl
from services.trainer.stored_rollouts import RolloutCollector, StoredRun
from services.trainer.surrogate import policy_loss, standardised_group_advantages
from worldserve.episodes import Episode, EpisodeWriter, SealedStateError
from worldserve.messages import StepReply

IDS = [f"task/train/{number}" for number in range(16)]


def config_of(out: Path = Path("unused"), **changes: Any) -> GRPOConfig:
    values: dict[str, Any] = {
        "out": out, "iterations": 2, "groups_per_iteration": 4, "group_size": 4, "batch": 16, "policy_batch": 8,
        "minibatch_size": 16, "microbatch_size": 8, "reward_source": "success", "update_epochs": 2,
        "learning_rate": 1e-3, "noise_level": 1.0, "noise_steps": (1,), "noise_modes": 1, "max_ratio": 1e6,
    }  # fmt: skip
    return GRPOConfig(**{**values, **changes})


class Outcomes:
    """Episodes of a bandit that succeed by a table: (initial state, number in its group) -> 1 or 0."""

    def __init__(self, inner: Any, table: Any, group_size: int) -> None:
        self.inner, self.table, self.group_size = inner, table, group_size

    def reset(self, items: Any) -> Any:
        return self.inner.reset(items)

    def close_episodes(self, ids: Any) -> None:
        self.inner.close_episodes(ids)

    def step(self, items: Any) -> list[StepReply]:
        replies = self.inner.step(items)
        return [
            dataclasses.replace(reply, success=self._success(item)) if isinstance(reply, StepReply) else reply
            for item, reply in zip(items, replies)
        ]

    def _success(self, item: Any) -> bool:
        number = int(item.episode_id.rsplit("/", 1)[1])
        return bool(self.table(number // self.group_size, number % self.group_size))


def sampled(client: Any, policy: Any, config: GRPOConfig, keyframes: Any = ()) -> grpo.Groups:
    policy.reconfigure(0, **config.policy_settings())
    collector = RolloutCollector(client, policy, config, "test")
    return grpo.sample_groups(collector, grpo.Starts(IDS, keyframes, config, 0), config, 0)


def mixed(group: int, member: int) -> bool:
    return member == 0


# Advantages and masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returns", "advantages"),
    [
        ([1.0, 0.0, 0.0, 0.0], [1.5, -0.5, -0.5, -0.5]),  # (r - 1/4) / (1/2)
        ([1.0, 1.0, 0.0, 0.0], [0.8660, 0.8660, -0.8660, -0.8660]),
        ([1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]),  # one outcome: no deviation, and no infinity
    ],
)
def test_standardised_advantages_by_hand(returns: list[float], advantages: list[float]) -> None:
    found = standardised_group_advantages(torch.tensor(returns), 4)
    assert found.tolist() == pytest.approx(advantages, abs=1e-4)


def test_standardised_advantages_are_torchrls() -> None:
    """Beside MCAdvantage, torchrl's group advantage: a transform of replay buffers that groups by prompt."""
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.objectives.llm import MCAdvantage

    returns = torch.tensor([1.0, 0.0, 1.0, 1.0])
    transform = MCAdvantage(grpo_size=4, prompt_key="query")
    episodes = [
        TensorDict(
            {
                "query": "one state",
                "next": TensorDict({"reward": reward.reshape(1, 1), "done": torch.ones(1, 1, dtype=torch.bool)}, [1]),
            },
            [1],
        )
        for reward in returns
    ]
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=transform, batch_size=4)
    for episode in episodes:
        buffer.extend(episode)
    theirs = buffer[:]["advantage"].flatten()
    assert sorted(standardised_group_advantages(returns, 4).tolist()) == pytest.approx(sorted(theirs.tolist()))


def test_weighted_policy_loss_leaves_masked_decisions_out() -> None:
    ratio, advantages = torch.zeros(3, 1), torch.tensor([2.0, -1.0, 5.0])
    assert float(policy_loss(ratio, advantages, 0.2, 0.28)) == pytest.approx(-2.0)
    assert float(policy_loss(ratio, advantages, 0.2, 0.28, torch.tensor([1.0, 1.0, 0.0]))) == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("first_success", "masked", "plain"),
    [
        (0, [0], [0, 1]),  # success during the first decision: the second carries nothing
        (1, [0, 1], [0, 1]),
        (2, [0, 1], [0, 1]),  # never
    ],
)
def test_decisions_after_the_first_success_carry_no_loss(
    bandit: Any, tiny_policy: Any, first_success: int, masked: list[int], plain: list[int]
) -> None:
    rollout = collect_rollout(bandit(), tiny_policy(), IDS[:1], 0, "success", "sample")
    rollout.first_success[:] = first_success
    assert grpo.learned_decisions(rollout, True).tolist() == masked
    assert grpo.learned_decisions(rollout, False).tolist() == plain


def test_the_first_success_is_the_decision_that_brought_it(bandit: Any, tiny_policy: Any) -> None:
    client = Outcomes(bandit(), lambda group, member: member != 1, 4)
    rollout = collect_rollout(client, tiny_policy(), IDS[:2], 0, "success", "sample")
    assert rollout.first_success.tolist() == [0, 2]
    verdicts = collect_rollout(bandit(threshold=-1e9), tiny_policy(), IDS[:1], 0, "verdict", "sample")
    assert verdicts.first_success.tolist() == [1]  # the verdict's peak is frame 60, past both chunks of 10


# Groups ----------------------------------------------------------------------------------------------------------


def test_groups_of_one_outcome_are_replaced_until_the_batch_is_full(bandit: Any, tiny_policy: Any) -> None:
    client = Outcomes(bandit(), lambda group, member: mixed(group, member) if group % 2 else group % 4 == 0, 4)
    groups = sampled(client, tiny_policy(), config_of())
    # Even groups fail or succeed as one. Four are drawn (1, 3 kept), then two (5), one (none: 6), and one (7).
    assert groups.kept.tolist() == [False, True] * 4
    assert groups.rounds == 4
    assert groups.batch is not None
    assert [plan.index // 4 for plan in groups.batch.plans] == [1] * 4 + [3] * 4 + [5] * 4 + [7] * 4
    assert len(groups.drawn) == 8 * 4
    assert groups.metrics()["env/groups_drawn"] == 8
    assert len({start.initial_state_id for start in groups.starts}) == 8  # new starts, not the same again


def test_what_replaces_a_group_does_not_depend_on_the_batch(bandit: Any, tiny_policy: Any) -> None:
    table = lambda group, member: mixed(group, member) if group != 1 else False  # noqa: E731
    first, second = (
        sampled(Outcomes(bandit(), table, 4), tiny_policy(), config_of(batch=batch, policy_batch=8))
        for batch in (16, 5)
    )
    assert [s.initial_state_id for s in first.starts] == [s.initial_state_id for s in second.starts]
    assert first.batch is not None
    assert second.batch is not None
    assert torch.equal(first.batch.samples["actions"], second.batch.samples["actions"])


def test_sampling_is_bounded_and_says_so(bandit: Any, tiny_policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = Outcomes(bandit(), lambda group, member: mixed(group, member) if group == 0 else True, 4)
    groups = sampled(client, tiny_policy(), config_of(max_sampling_rounds=3))
    assert groups.batch is not None
    assert (len(groups.batch), groups.rounds, len(groups.starts)) == (4, 3, 4 + 3 + 3)
    assert "1 of 4 groups have both outcomes after max_sampling_rounds = 3 (10 groups drawn)" in caplog.text
    assert "the batch is smaller" in caplog.text


def test_without_dynamic_sampling_every_group_is_learned_from(bandit: Any, tiny_policy: Any) -> None:
    client = Outcomes(bandit(), lambda group, member: True, 4)
    groups = sampled(client, tiny_policy(), config_of(dynamic_sampling=False))
    assert groups.kept.tolist() == [True] * 4
    assert groups.batch is not None
    assert not grpo.advantages_of(groups.batch, config_of()).any()


def test_a_group_that_lost_an_episode_is_replaced(bandit: Any, tiny_policy: Any) -> None:
    client = Outcomes(bandit(unavailable={5: 9}), mixed, 4)
    groups = sampled(client, tiny_policy(), config_of(max_failed_fraction=0.2))
    assert groups.kept.tolist() == [True, False, True, True, True]


# Keyframes -------------------------------------------------------------------------------------------------------


def record_episode(
    writer: EpisodeWriter, number: int, success: bool, after: list[bool], purpose: str = "train"
) -> None:
    actions = (np.arange(20, dtype=np.float32)[:, None] / 100 + number).clip(-1, 1).repeat(14, 1)
    writer.append(
        Episode(
            episode_id=f"recorded/{number}", initial_state_id=f"task/{purpose}/{number}", seed=0, instruction="go",
            requested_actions=actions, executed_actions=actions, proprioception=np.zeros((21, 14), np.float32),
            rewards=np.zeros(20, np.float32), success=success, metadata={"success_after_chunk": after},
        )
    )  # fmt: skip


def test_keyframes_are_successes_before_they_succeeded(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path / "data") as writer:
        record_episode(writer, 0, True, [False, True])
        record_episode(writer, 1, False, [False, False])
        record_episode(writer, 2, True, [True, True])  # had succeeded when its second decision came
    [start] = load_keyframes(tmp_path / "data", (1, 2), 10)
    assert (start.initial_state_id, start.source) == ("task/train/0", "recorded/0")
    assert start.prefix_chunks is not None
    assert start.prefix_chunks.shape == (1, 10, 14)
    assert start.prefix_chunks[0, :, 0].tolist() == pytest.approx([n / 100 for n in range(10)])
    with pytest.raises(ValueError, match="name other --keyframe-decisions"):
        load_keyframes(tmp_path / "data", (2,), 10)
    with pytest.raises(ValueError, match="expected recordings of interface abc"):
        load_keyframes(tmp_path / "data", (1,), 10, "abc")


def test_keyframes_from_sealed_test_states_are_refused(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path / "data") as writer:
        record_episode(writer, 0, True, [False, True], purpose="test")
    with pytest.raises(SealedStateError):
        load_keyframes(tmp_path / "data", (1,), 10)


def test_a_keyframe_start_replays_its_prefix_and_the_policy_acts_from_there(bandit: Any, tiny_policy: Any) -> None:
    client, policy = bandit(), tiny_policy()
    prefix = np.full((1, 10, 14), 0.25, np.float32)
    plans = [
        EpisodePlan(0, "run/0/0", "task/train/3", (0, 0, 0), prefix),
        EpisodePlan(1, "run/0/1", "task/train/3", (0, 0, 1)),
    ]
    rollout = collect_rollout(client, policy, [], 0, "success", "sample", plans=plans)
    assert rollout.acted.tolist() == [[False, True], [True, True]]
    sent = {(step.episode_id, step.chunk_index): step.actions for step in client.steps}
    assert np.array_equal(sent["run/0/0", 0], prefix[0])
    assert not np.array_equal(sent["run/0/0", 1], prefix[0])
    assert rollout.samples["denoise_index"][0].tolist()[0] == -1
    # What the policy saw at its first decision is what came after the replayed chunk.
    assert np.array_equal(rollout.images[0, 1], client.frame("task/train/3", 10))
    assert rollout.states[0, 1].tolist() == pytest.approx([0.25] * 14)
    assert grpo.learned_decisions(rollout, False).tolist() == [1, 2, 3]


def test_keyframes_start_their_share_of_the_groups() -> None:
    keyframes = [Start("task/train/99", np.zeros((1, 10, 14), np.float32), "recorded/0")]
    for share, expected in ((0.0, 0), (1.0, 40)):
        starts = grpo.Starts(IDS, keyframes, config_of(keyframe_share=share), 0).draw(40)
        assert sum(start.prefix_chunks is not None for start in starts) == expected
    half = grpo.Starts(IDS, keyframes, config_of(keyframe_share=0.5), 0).draw(200)
    assert 70 <= sum(start.prefix_chunks is not None for start in half) <= 130


# Whole runs ------------------------------------------------------------------------------------------------------


def run(client: Any, policy: Any, config: GRPOConfig, stored: StoredRun | None = None) -> list[dict[str, Any]]:
    record = RunRecord(config.out, {}, config.resume)
    try:
        grpo.train(client, policy, IDS, config, record, stored=stored)
    finally:
        record.close()
    return read_jsonl(config.out / "metrics.jsonl")


def test_a_run_learns_the_bandit(bandit: Any, tiny_policy: Any, tmp_path: Path) -> None:
    config = config_of(
        tmp_path, iterations=12, groups_per_iteration=8, group_size=8, batch=64, policy_batch=16, minibatch_size=32,
        microbatch_size=32, update_epochs=4, learning_rate=3e-3, trainable="all",
    )  # fmt: skip
    rows = run(bandit(), tiny_policy(), config)
    rates = [row["env/success"] for row in rows]
    assert rates[0] < 0.7
    assert np.mean(rates[-3:]) > 0.75
    assert {"actor/approx_kl", "actor/clip_fraction", "actor/ratio", "actor/grad_norm"} <= set(rows[0])
    assert not any(name.startswith("critic/") for row in rows for name in row)


def test_the_critic_is_left_alone_and_its_parameters_are_saved(bandit: Any, tiny_policy: Any, tmp_path: Path) -> None:
    policy = tiny_policy()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    run(bandit(), policy, config_of(tmp_path))
    changed = {n.split(".")[0] for n, value in policy.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == {"expert"}


def test_a_resumed_run_equals_an_uninterrupted_one_and_takes_from_the_store_what_it_had(
    bandit: Any, tiny_policy: Any, tmp_path: Path
) -> None:
    whole = run(bandit(), tiny_policy(), config_of(tmp_path / "whole", batch=8))
    stored = StoredRun(MemoryStore(), "run")
    resets = 4 * 4 * whole[0]["env/groups_drawn"] // 4  # of the first iteration
    dying = bandit(fail_after_resets=resets + 8)
    with pytest.raises(ConnectionError):
        run(dying, tiny_policy(), config_of(tmp_path / "cut", batch=8), stored)
    kept = len(stored.store.infos())
    assert kept == resets + 8
    client = bandit()
    again = run(client, tiny_policy(), config_of(tmp_path / "cut", batch=8, resume=True), stored)
    timeless = [
        [{k: v for k, v in row.items() if not k.startswith(("time/", "agreement/"))} for row in rows]
        for rows in (whole, again)
    ]
    assert timeless[0] == timeless[1]
    assert len(client.resets) == 4 * whole[1]["env/groups_drawn"] - 8  # the eight that were there were not run again


def test_rows_name_every_episode_its_group_and_its_start(bandit: Any, tiny_policy: Any, tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path / "data") as writer:
        record_episode(writer, 0, True, [False, True])
    config = config_of(tmp_path / "run", iterations=1, keyframes=tmp_path / "data", keyframe_share=0.5)
    [metrics] = run(bandit(), tiny_policy(), config)
    rows = read_jsonl(tmp_path / "run" / "episodes.jsonl")
    assert len(rows) == 4 * metrics["env/groups_drawn"]
    assert sum(row["group_kept"] for row in rows) == 4 * metrics["env/groups_kept"]
    starts = {(row["start_decision"], row["start_recording"]) for row in rows}
    assert starts <= {(0, ""), (1, "recorded/0")}
    assert sum(row["start_decision"] == 1 for row in rows) == 4 * metrics["env/keyframe_groups"]


def test_an_iteration_without_a_mixed_group_skips_its_update(
    bandit: Any, tiny_policy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = tiny_policy()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    [row] = run(bandit(threshold=-1e9), policy, config_of(tmp_path, iterations=1, max_sampling_rounds=2))
    assert (row["env/success"], row["env/groups_kept"], row["rollout/learned_decisions"]) == (1.0, 0, 0)
    assert "the update is skipped" in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


# Settings --------------------------------------------------------------------------------------------------------


def test_defaults_and_recipe_are_wmpos() -> None:
    for config in (GRPOConfig(), GRPOConfig(**load_recipe("grpo-mini", GRPOConfig))):
        assert (config.clip_low, config.clip_high, config.group_size) == (0.2, 0.28, 8)
        assert config.dynamic_sampling
        assert config.mask_after_success


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, "group_size: expected at least 2; got 1"),
        ({"max_sampling_rounds": 0}, "max_sampling_rounds: expected at least 1"),
        ({"keyframe_share": 1.5}, "keyframe_share"),
        ({"keyframe_decisions": (0,)}, "0 is the episode's start"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**changes)
