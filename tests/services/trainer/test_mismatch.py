"""Closed-loop replay: what was executed runs again unchanged, figures follow from the rows, and a second call goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.closed_loop import Checkpoint, measure, replay_all
from services.trainer.evaluate import evaluation_plans
from services.trainer.fork_statistics import excess, rate
from services.trainer.mismatch import MismatchConfig, main
from services.trainer.mismatch_statistics import summarise
from services.trainer.policies import FlowPolicy, flow_mini, save_policy
from services.trainer.run_record import read_json, read_jsonl
from tests.services.trainer.conftest import item_error
from tests.worldserve.serving.conftest import StubBackend, StubScorer, chunk
from worldserve.contract import adjust_bottle, fingerprint
from worldserve.episodes import InitialStateSet
from worldserve.files import file_sha256
from worldserve.messages import (
    BackendChunk,
    BackendStep,
    ItemError,
    ReplayItem,
    ReplayOutcome,
    ResetItem,
    ResetReply,
    Verdict,
)
from worldserve.serving import RunningServer, ServerSettings, start_environment_server, start_reward_server
from worldserve.serving.judge import RemoteJudge

ROOT = Path(__file__).parents[3]
STATES = [f"task/validation/{n}" for n in range(4)]
SETTINGS = {"mode": "mean", "batch": 4, "policy_batch": 4, "replay_failures": False}


@dataclass
class Simulator:
    """A reference in which the states of `failing` end in failure; `errors` are answered first, by state."""

    failing: Sequence[str] = ()
    errors: dict[str, list[str]] = field(default_factory=dict)
    success_known: bool = True
    clipped: int = 0
    items: list[ReplayItem] = field(default_factory=list)

    def replay(self, items: Sequence[ReplayItem]) -> Iterator[tuple[str, ReplayOutcome | ItemError]]:
        for item in reversed(items):  # outcomes come in any order
            if self.errors.get(item.initial_state_id):
                yield item.episode_id, item_error(self.errors[item.initial_state_id].pop())
                continue
            self.items.append(item)
            success = item.initial_state_id not in self.failing if self.success_known else None
            verdict = Verdict(True, 0.9, 60, 0.5)
            yield (
                item.episode_id,
                ReplayOutcome(item.episode_id, len(item.actions), success, verdict, 0.0, "", self.clipped),
            )


def checkpoints(policy: Any, *names: str) -> list[Checkpoint]:
    return [Checkpoint(name, policy, {}) for name in names]


def measured(
    client: Any, simulator: Simulator, policy: Any, out: Path, *names: str, successes: int = 4, **settings: Any
) -> list[dict[str, Any]]:
    plans = evaluation_plans(STATES, range(3), "run")
    found = checkpoints(policy, *(names or ("policy",)))
    return measure(client, simulator, found, plans, successes, "verdict", {**SETTINGS, **settings}, out)


def test_successes_are_replayed_as_executed_from_their_own_state(bandit: Any, tiny_policy: Any, tmp_path: Path) -> None:
    client, simulator = bandit(threshold=-10.0), Simulator(failing=STATES[:1])
    rows = measured(client, simulator, tiny_policy(), tmp_path)
    assert [row["reference_success"] for row in rows] == [0, 1, 1, 1]
    assert {row["judged"] for row in rows} == {1}
    for item in simulator.items:
        sent = [step.actions for step in client.steps if step.episode_id == item.episode_id]
        np.testing.assert_array_equal(item.actions, np.concatenate(sent).clip(-1, 1))  # what the bandit executes
        assert item.actions.dtype == np.float32
        [reset] = [reset for reset in client.resets if reset.episode_id == item.episode_id]
        assert (reset.initial_state_id, reset.seed) == (item.initial_state_id, item.seed)
    assert client.open_episodes == set()


def test_failures_are_replayed_only_when_asked_for(bandit: Any, tiny_policy: Any, tmp_path: Path) -> None:
    simulator = Simulator(failing=STATES[1:])
    rows = measured(bandit(threshold=10.0), simulator, tiny_policy(), tmp_path / "a")
    assert len(rows) == 12  # every plan: there never was a success
    assert simulator.items == []
    assert {row["reference_success"] for row in rows} == {-1}
    rows = measured(bandit(threshold=10.0), simulator, tiny_policy(), tmp_path / "b", replay_failures=True)
    found = summarise(rows, False, True, 0.9, 0)
    assert found["policy"]["mismatch"] is None
    assert found["policy"]["replayed"] == 0
    assert found["policy"]["missed_success"]["value"] == 0.25


def test_rounds_go_on_until_every_checkpoint_has_enough(bandit: Any, tiny_policy: Any, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    rows = measure(
        bandit(threshold=-10.0), Simulator(), checkpoints(tiny_policy(), "policy", "baseline"),
        evaluation_plans(STATES, range(3), "run"), 5, "verdict", SETTINGS, tmp_path, lambda *at: seen.append(at),
    )  # fmt: skip
    assert seen == [("policy", 4, 4), ("baseline", 4, 4), ("policy", 8, 8), ("baseline", 8, 8)]
    table = {
        name: [(row["initial_state_id"], row["evaluation_seed"]) for row in rows if row["checkpoint"] == name]
        for name in ("policy", "baseline")
    }
    assert table["policy"] == table["baseline"] == [(state, seed) for seed in (0, 1) for state in STATES]


def test_the_same_noise_for_policy_and_baseline(bandit: Any, tiny_policy: Any, tmp_path: Path) -> None:
    rows = measured(bandit(threshold=-10.0), Simulator(), tiny_policy(), tmp_path, "policy", "baseline")
    first, second = rows[:4], rows[4:]
    assert [{**row, "checkpoint": ""} for row in first] == [{**row, "checkpoint": ""} for row in second]


def test_a_second_call_runs_only_what_is_missing(bandit: Any, tiny_policy: Any, tmp_path: Path) -> None:
    whole = measured(bandit(threshold=-10.0), Simulator(), tiny_policy(), tmp_path / "whole", successes=8)
    broken = bandit(threshold=-10.0, fail_after_resets=6)
    with pytest.raises(ConnectionError):
        measured(broken, Simulator(), tiny_policy(), tmp_path / "cut", successes=8)
    assert len(read_jsonl(tmp_path / "cut" / "episodes.jsonl")) == 4
    client = bandit(threshold=-10.0)
    assert measured(client, Simulator(), tiny_policy(), tmp_path / "cut", successes=8) == whole
    assert len(client.resets) == 4
    more = bandit(threshold=-10.0)  # more successes may be asked for later
    assert measured(more, Simulator(), tiny_policy(), tmp_path / "cut", successes=9)[:8] == whole
    assert len(more.resets) == 4


def test_a_failed_replay_loses_no_other_episode(bandit: Any, tiny_policy: Any, tmp_path: Path) -> None:
    simulator = Simulator(errors={STATES[2]: ["INVALID_ARGUMENT"] * 9})
    with pytest.raises(
        RuntimeError, match=r"3 episodes could not be finished; the first: task/validation/2 in the ref"
    ):
        measured(bandit(threshold=-10.0), simulator, tiny_policy(), tmp_path, successes=12)
    rows = read_jsonl(tmp_path / "episodes.jsonl")
    assert len(rows) == 9
    assert STATES[2] not in {row["initial_state_id"] for row in rows}
    client = bandit(threshold=-10.0)
    assert len(measured(client, Simulator(), tiny_policy(), tmp_path, successes=12)) == 12
    assert {reset.initial_state_id for reset in client.resets} == {STATES[2]}


def test_a_replay_that_fails_for_a_passing_reason_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.calls.time.sleep", lambda seconds: None)
    items = [ReplayItem(state, state, 0, chunk()) for state in STATES]
    simulator = Simulator(errors={STATES[0]: ["UNAVAILABLE"] * 2, STATES[1]: ["UNAVAILABLE"] * 99})
    outcomes = replay_all(simulator, items)
    assert isinstance(outcomes[STATES[0]], ReplayOutcome)
    assert isinstance(outcomes[STATES[1]], ItemError)
    assert len(simulator.items) == 3


@pytest.mark.parametrize(
    ("simulator", "message"),
    [
        (Simulator(success_known=False), "expected one that knows the true success"),
        (Simulator(clipped=3), "expected the 50 executed actions of task/validation/0 to run unchanged; 3 numbers were"),
    ],
)  # fmt: skip
def test_a_replay_that_says_nothing_is_refused(simulator: Simulator, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        replay_all(simulator, [ReplayItem("a", STATES[0], 0, chunk())])


def counts(*pairs: tuple[int, int]) -> dict[str, tuple[int, int]]:
    return {f"state-{number}": pair for number, pair in enumerate(pairs)}


def test_the_share_is_a_ratio_of_sums_over_states() -> None:
    found = rate(counts((1, 1), (0, 9), (0, 0), (1, 10)), 0.9, 0)
    assert found is not None
    assert found["value"] == 2 / 20
    assert found["low"] < 0.1 < found["high"]
    assert rate(counts((0, 0), (0, 0)), 0.9, 0) is None


def test_the_excess_pairs_states_and_counts_those_where_both_sides_have_a_success() -> None:
    first = counts((2, 4), (1, 2), (0, 0), (1, 2))  # 4 of 8, one half in each state
    second = counts((1, 4), (0, 0), (1, 4), (1, 4))  # 3 of 12, a quarter in each
    found = excess(first, second, 0.9, 0)
    assert found is not None
    assert (found["value"], found["count"]) == (0.25, 2)
    # Whatever states are drawn, the shares stay one half and a quarter: pairing leaves no spread.
    assert found["low"] == pytest.approx(0.25)
    assert found["high"] == pytest.approx(0.25)
    assert excess(first, counts((0, 0), (0, 0), (0, 0), (0, 0)), 0.9, 0) is None


def test_failures_that_the_reward_misreads_in_the_simulator_too_are_its_own() -> None:
    row = {"checkpoint": "policy", "initial_state_id": "s", "evaluation_seed": 0, "judged": 1}
    rows = [{**row, "reference_success": 0, "reference_verdict": verdict} for verdict in (1, 0, 0)]
    assert summarise(rows, False, False, 0.9, 0)["policy"]["failed_read_as_success"] == 1
    unjudged = [{**item, "reference_verdict": -1} for item in rows]
    assert summarise(unjudged, False, False, 0.9, 0)["policy"]["failed_read_as_success"] is None


@dataclass
class World(StubBackend):
    """Frames are bright where the right arm's first joint ends above `threshold`, and so is success, in a simulator."""

    threshold: float = 0.0

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        state = chunk(0.0)[0]
        dark = np.zeros((96, 128, 3), np.uint8)
        return [ResetReply(item.episode_id, item.initial_state_id, item.seed, dark, state, "lift it") for item in items]

    def step(self, items: Sequence[BackendStep]) -> list[BackendChunk | ItemError]:
        simulated = self.contract.provenance.kind == "simulator"
        outcomes: list[BackendChunk | ItemError] = []
        for item in items:
            success = bool(item.actions[-1, 7] > self.threshold)
            frames = np.full((len(item.frame_indices), 96, 128, 3), 250 if success else 0, np.uint8)
            outcomes.append(BackendChunk(frames, success if simulated else None))
        return outcomes


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a `World` with a reward server unless told otherwise; returns its address."""
    running: list[RunningServer] = [start_reward_server(StubScorer(), ServerSettings())]

    def start(kind: str, threshold: float = 0.0, judged: bool = True) -> str:
        facts = {"judge": "reward_model" if judged else "none" if kind == "world_model" else "ground_truth"}
        if kind == "world_model":
            facts |= {"weights_sha256": "a" * 64, "reward_provenance": "d" * 64}
        world = World(capacity=16, contract=adjust_bottle(kind, "stub", facts), threshold=threshold)
        judge = RemoteJudge(running[0].address) if judged else None
        running.append(start_environment_server(world, judge, ServerSettings()))
        return running[-1].address

    yield start
    for server in reversed(running):
        server.stop(0)


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., int]:
    """`worldserve mismatch` of an untrained policy on two validation states."""
    save_policy(FlowPolicy(flow_mini(), 0), tmp_path / "policy", {})

    def call(target: str, reference: str, *more: str, out: str = "out") -> int:
        return main([
            "--policy", str(tmp_path / "policy"), "--target", target, "--reference", reference,
            "--out", str(tmp_path / out), "--initial-states", str(ROOT / "initial_states" / "validation"),
            "--max-states", "2", "--successes", "2", "--max-episodes", "2", "--batch", "2", "--policy-batch", "2", *more,
        ])  # fmt: skip

    return call


def test_a_world_model_that_draws_everything_as_success_is_found_out(
    serve: Any, command: Any, tmp_path: Path, capsys: Any
) -> None:
    world, simulator = serve("world_model", -9.0), serve("simulator", 9.0, judged=False)
    save_policy(FlowPolicy(flow_mini(), 1), tmp_path / "baseline", {})
    assert command(world, simulator, "--baseline", str(tmp_path / "baseline")) == 0
    result = read_json(tmp_path / "out" / "result.json")
    for name in ("policy", "baseline"):
        assert result[name]["mismatch"]["value"] == 1.0
        assert (result[name]["replayed"], result[name]["failed"], result[name]["failed_read_as_success"]) == (
            2,
            2,
            None,
        )
    assert result["excess"]["value"] == 0.0
    assert result["successes_reached"] is True
    contract = adjust_bottle("simulator", "stub", {"judge": "ground_truth"})
    identity = result["identity"]
    assert identity["target_weights_sha256"] == "a" * 64
    assert identity["reward_provenance"] == "d" * 64
    assert "weights_sha256" not in identity["target_drawn"]
    assert identity["interface"] == fingerprint(contract.interface)
    assert identity["reference_provenance"] == fingerprint(contract.provenance)
    assert identity["policy_model_sha256"] == file_sha256(tmp_path / "policy" / "model.safetensors")
    assert identity["baseline_model_sha256"] == file_sha256(tmp_path / "baseline" / "model.safetensors")
    sealed = InitialStateSet.load(ROOT / "initial_states" / "validation")
    assert result["initial_states"]["sha256"] == sealed.sha256
    [start] = read_json(tmp_path / "out" / "run.json")["starts"]
    assert start["command"] == "worldserve mismatch"
    assert set(start["inputs"]) == {"policy", "baseline", "initial_states", "reference"}
    shown = capsys.readouterr()
    assert "(validation, 2 states)" in shown.err
    assert "policy mismatch 1.000" in shown.out


def test_a_simulator_in_the_world_models_place_has_no_mismatch(serve: Any, command: Any, tmp_path: Path) -> None:
    """The control: in the same world every success succeeds again, whoever judges the first time."""
    simulator = serve("simulator", -9.0, judged=False)
    assert command(simulator, simulator, "--baseline", str(tmp_path / "policy")) == 0
    result = read_json(tmp_path / "out" / "result.json")
    assert result["policy"]["mismatch"]["value"] == 0.0
    assert result["policy"]["replayed"] == 2
    assert result["baseline"] == result["policy"]  # the same weights are run once
    assert {row["checkpoint"] for row in read_jsonl(tmp_path / "out" / "episodes.jsonl")} == {"policy"}


def test_too_few_successes_within_the_bound_are_said(serve: Any, command: Any, tmp_path: Path, capsys: Any) -> None:
    world, simulator = serve("world_model", 9.0), serve("simulator", 0.0, judged=False)
    assert command(world, simulator) == 1
    result = read_json(tmp_path / "out" / "result.json")
    assert (result["successes_reached"], result["policy"]["mismatch"]) == (False, None)
    assert "expected 2 replayed successes of every checkpoint; got 0 in 2 episodes" in capsys.readouterr().err


def test_results_of_other_settings_or_measures_are_not_mixed_in(
    serve: Any, command: Any, tmp_path: Path, capsys: Any
) -> None:
    simulator = serve("simulator", -9.0, judged=False)
    assert command(simulator, simulator) == 0
    assert command(simulator, simulator, "--mode", "sample") == 1
    said = capsys.readouterr().err
    assert "other settings" in said
    assert "mode: expected 'mean'; got 'sample'" in said
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "evaluation.json").write_text('{"mode": "mean"}')
    assert command(simulator, simulator, "--fresh", out="evaluation") == 1
    assert "holds another measure's" in capsys.readouterr().err


def test_what_cannot_be_compared_is_refused_before_an_episode(
    serve: Any, command: Any, tmp_path: Path, capsys: Any
) -> None:
    world, simulator = serve("world_model"), serve("simulator", judged=False)
    assert command(serve("world_model", judged=False), simulator) == 1
    assert "expected a target with a reward server" in capsys.readouterr().err
    assert command(world, world) == 1
    assert "reference: expected a simulator, which knows the true success" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"successes": 0}, "successes: expected at least 1; got 0"),
        ({"max_states": 0}, "max_states: expected at least 1"),
        ({"first_seed": -1}, "first_seed, bootstrap_seed: expected at least 0"),
        ({"noise_level": 0.3}, "noise_level: expected a positive number, with --mode sample"),
        ({"noise_level": float("nan"), "mode": "sample"}, "noise_level: expected a positive number"),
        ({"confidence": 1.0}, "confidence: expected a number between 0 and 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MismatchConfig(**settings)
