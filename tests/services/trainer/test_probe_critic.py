"""A linear probe of what the critic reads, against features whose answer is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from services.trainer.policies import FlowPolicy, flow_mini, save_policy
from services.trainer.probe_critic import (
    PENALTIES,
    ProbeCriticConfig,
    between_states,
    explained,
    fold_of_states,
    held_out_predictions,
    main,
    ridge,
)
from worldserve.episodes import Episode, EpisodeWriter

STATES = [f"task/train/{number // 4:04d}" for number in range(400)]  # 100 states, 4 rollouts each


def probed(features: NDArray[np.float64], outcomes: NDArray[np.float64]) -> tuple[float, float, float]:
    folds = fold_of_states(STATES, 5, np.random.default_rng(0))
    found = explained(held_out_predictions(features, outcomes, folds), outcomes, STATES, 0.9, np.random.default_rng(1))
    return found.value, found.low, found.high


def test_all_rollouts_of_a_state_are_in_one_fold() -> None:
    folds = fold_of_states(STATES, 5, np.random.default_rng(0))
    assert {len({int(fold) for fold, state in zip(folds, STATES) if state == name}) for name in set(STATES)} == {1}
    assert np.bincount(folds).tolist() == [80] * 5
    with pytest.raises(ValueError, match=r"at least 101 initial states \(--folds\); got 100"):
        fold_of_states(STATES, 101, np.random.default_rng(0))


def test_ridge_is_least_squares_without_a_penalty_and_the_mean_with_a_large_one() -> None:
    random = np.random.default_rng(0)
    features = np.concatenate([random.normal(size=(50, 3)) * [1.0, 100.0, 0.01], np.ones((50, 1))], axis=1)
    targets = features @ [0.5, 0.02, -7.0, 0.0] + 3.0
    weights, intercept = ridge(features, targets, [1e-12, 1e12])
    np.testing.assert_allclose(weights[:, 0], [0.5, 0.02, -7.0, 0.0], atol=1e-9)
    assert intercept[0] == pytest.approx(3.0)
    np.testing.assert_allclose(features @ weights[:, 1] + intercept[1], targets.mean(), atol=1e-6)


@pytest.mark.parametrize(("noise", "low", "high"), [(0.0, 0.55, 0.75), (100.0, -0.1, 0.1)])
def test_what_is_there_is_found_and_what_is_not_is_not(noise: float, low: float, high: float) -> None:
    """A threshold on a normal number: a line explains 2 / pi of it; noise a hundred times larger hides it."""
    random = np.random.default_rng(0)
    hidden = random.normal(size=400)
    features = np.stack([hidden + noise * random.normal(size=400), *random.normal(size=(9, 400))], axis=1)
    value, below, above = probed(features, (hidden > 0).astype(float))
    assert low < value < high
    assert below < value < above


def test_the_name_of_a_state_explains_nothing_on_others() -> None:
    """One feature a state, and outcomes that the state decides: a probe that saw its own states would explain all."""
    decided = np.repeat(np.random.default_rng(0).integers(0, 2, 100), 4).astype(float)
    value, _, _ = probed(np.repeat(np.eye(100), 4, axis=0), decided)
    assert value < 0.05
    assert between_states(decided, STATES) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("outcomes", "states", "expected"),
    [([1, 0, 1, 0], ["a", "a", "b", "b"], 0.0), ([1, 1, 0, 0], ["a", "a", "b", "b"], 1.0), ([1, 0], ["a", "b"], None)],
)
def test_between_states(outcomes: list[int], states: list[str], expected: float | None) -> None:
    assert between_states(np.array(outcomes, np.float64), states) == expected


def test_penalties_reach_from_none_to_the_mean() -> None:
    assert PENALTIES[0] <= 0.01
    assert PENALTIES[-1] >= 1e5


def recorded(directory: Path, states: int, outcome: Callable[[int], bool]) -> Path:
    """Two rollouts of 100 actions a state; the picture is bright where the outcome of its state is a success."""
    with EpisodeWriter(directory) as writer:
        for number in range(2 * states):
            success = outcome(number // 2)
            actions = np.zeros((100, 14), np.float32)
            writer.append(
                Episode(
                    episode_id=f"made/{number}",
                    initial_state_id=f"adjust_bottle/train/{number // 2:04d}",
                    seed=number,
                    instruction="Hold it.",
                    requested_actions=actions,
                    executed_actions=actions,
                    success=success,
                    proprioception=np.zeros((101, 14), np.float32),
                    rewards=np.zeros(100, np.float32),
                    frame_source=np.full((101, 96, 128, 3), 200 if success else 40, np.uint8),
                )
            )
    return directory


def test_the_command_reads_a_policy_and_its_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_policy(FlowPolicy(flow_mini(), 0), tmp_path / "policy", {})
    data = recorded(tmp_path / "data", 12, lambda state: state % 2 == 0)
    command = ["--data", str(data), "--policy", str(tmp_path / "policy"), "--folds", "3", "--batch", "7"]
    assert main([*command, "--out", str(tmp_path / "probe.json")]) == 0
    found = json.loads((tmp_path / "probe.json").read_text())
    assert set(found["r2"]) == {"prefix", "prefix_tokens", "expert"}
    assert {name: len(decisions) for name, decisions in found["r2"].items()} == dict.fromkeys(found["r2"], 2)
    for name in ("prefix", "prefix_tokens"):  # an untrained expert drowns the picture in its noise
        assert found["r2"][name][0]["value"] > 0.9
    assert (found["episodes"], found["states"], found["successes"], found["between_states"]) == (24, 12, 12, 1.0)
    assert "24 rollouts of 12 initial states, 12 successes" in capsys.readouterr().out
    assert main([*command, "--out", str(tmp_path / "again.json"), "--batch", "64"]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["r2"]["expert"][1]["value"] == pytest.approx(found["r2"]["expert"][1]["value"], abs=1e-4)

    one_kind = recorded(tmp_path / "won", 3, lambda state: True)
    assert main(["--data", str(one_kind), "--policy", str(tmp_path / "policy"), "--out", str(tmp_path / "x.json")]) == 1
    assert "expected failures and successes; got 6 of 6 successes" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"folds": 1}, {"batch": 0}, {"confidence": 1.0}, {"episodes": -1}])
def test_senseless_settings_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        ProbeCriticConfig(data=(Path("d"),), **changes)  # type: ignore[arg-type]
