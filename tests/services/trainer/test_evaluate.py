"""Evaluation: common noise for policy and reference, resumable rows, intervals that the rows alone give back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.trainer.evaluate import (
    EVALUATION,
    EvaluateConfig,
    evaluate_policy,
    evaluation_plans,
    main,
    outcomes_by_state,
    reference_rows,
    run,
    summarise,
)
from services.trainer.policies import FlowPolicy, flow_mini, save_policy
from services.trainer.run_record import read_json, read_jsonl
from tests.worldserve.serving.conftest import StubBackend
from worldserve.contract import adjust_bottle, fingerprint
from worldserve.serving import ServerSettings, start_environment_server

STATES = [f"task/test/{n}" for n in range(5)]
SETTINGS = {"evaluation_seeds": (0, 1), "mode": "mean", "batch": 3, "policy_batch": 4, "policy_sha256": "a"}


def test_noise_depends_on_seed_and_state_and_not_on_the_order() -> None:
    forward = {(p.initial_state_id, p.entropy[0]): p.entropy for p in evaluation_plans(STATES, (0, 1), "a")}
    backward = {(p.initial_state_id, p.entropy[0]): p.entropy for p in evaluation_plans(STATES[::-1], (1, 0), "b")}
    assert forward == backward
    assert len(set(forward.values())) == 10


def test_an_interrupted_evaluation_goes_on_and_gives_the_same_rows(
    bandit: Any, tiny_policy: Any, tmp_path: Path
) -> None:
    policy = tiny_policy()
    whole = evaluate_policy(bandit(), policy, STATES, SETTINGS, tmp_path / "whole")
    with pytest.raises(ConnectionError):
        evaluate_policy(bandit(fail_after_resets=4), policy, STATES, SETTINGS, tmp_path / "cut")
    assert len(read_jsonl(tmp_path / "cut" / "episodes.jsonl")) == 3
    client = bandit()
    assert evaluate_policy(client, policy, STATES, SETTINGS, tmp_path / "cut") == whole
    assert len(client.resets) == 7
    assert client.open_episodes == set()


def test_a_line_cut_short_by_a_kill_is_run_again(bandit: Any, tiny_policy: Any, tmp_path: Path) -> None:
    whole = evaluate_policy(bandit(), tiny_policy(), STATES, SETTINGS, tmp_path)
    path = tmp_path / "episodes.jsonl"
    path.write_text(path.read_text()[:-20])
    client = bandit()
    assert evaluate_policy(client, tiny_policy(), STATES, SETTINGS, tmp_path) == whole
    assert len(client.resets) == 1


def test_results_of_other_settings_are_not_mixed_in(bandit: Any, tiny_policy: Any, tmp_path: Path) -> None:
    evaluate_policy(bandit(), tiny_policy(), STATES, SETTINGS, tmp_path)
    with pytest.raises(ValueError, match="policy_sha256: expected 'a'; got 'b'"):
        evaluate_policy(bandit(), tiny_policy(), STATES, {**SETTINGS, "policy_sha256": "b"}, tmp_path)


def test_unfinished_episodes_are_an_error_that_says_so(
    bandit: Any, tiny_policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.calls.time.sleep", lambda seconds: None)
    with pytest.raises(RuntimeError, match=r"1 of 10 episodes could not be finished; the first: task/test/1"):
        evaluate_policy(bandit(unavailable={1: 1000}), tiny_policy(), STATES, SETTINGS, tmp_path)
    assert len(read_jsonl(tmp_path / "episodes.jsonl")) == 9


def _rows(success: list[list[int]], verdict: list[list[int]]) -> list[dict[str, Any]]:
    return [
        {"initial_state_id": f"s{i}", "evaluation_seed": seed, "success": s, "verdict": v}
        for i, (successes, verdicts) in enumerate(zip(success, verdict))
        for seed, (s, v) in enumerate(zip(successes, verdicts))
    ]


def test_summary_pairs_states() -> None:
    none = [[-1, -1]] * 4
    result = summarise(
        _rows([[1, 1], [1, 1], [0, 1], [0, 1]], none), _rows([[1, 0], [1, 0], [0, 0], [0, 0]], none), 0.9, 0
    )
    assert result["success"]["value"] == 0.75
    assert result["reference_success"]["value"] == 0.25
    assert result["success_gain"]["value"] == 0.5
    assert result["success_gain"]["low"] == result["success_gain"]["high"] == 0.5
    assert "verdict" not in result


def test_a_judge_that_is_silent_once_does_not_judge() -> None:
    assert outcomes_by_state(_rows([[1, 0]], [[1, -1]]), "verdict") is None
    assert outcomes_by_state(_rows([[1, 0]], [[1, -1]]), "success") == {"s0": [1, 0]}


def test_repeated_evaluation_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="distinct seeds"):
        EvaluateConfig(evaluation_seeds=(1, 1))


ROOT = Path(__file__).parents[3]


def test_an_evaluation_goes_on_against_the_same_server_only(tmp_path: Path) -> None:
    """One interface, two provenances: the second target may judge otherwise, or not know the truth at all."""
    contracts = [adjust_bottle("simulator", "stub", {}), adjust_bottle("world_model", "stub", {})]
    servers = [start_environment_server(StubBackend(contract=c), None, ServerSettings()) for c in contracts]
    save_policy(FlowPolicy(flow_mini(), 0), tmp_path / "policy", {})

    def evaluate(number: int, out: str, reference: str | None = None) -> int:
        return run(
            EvaluateConfig(
                target=servers[number].address,
                policy=tmp_path / "policy",
                out=tmp_path / out,
                reference=tmp_path / reference if reference else None,
                initial_states=ROOT / "initial_states" / "train",
                max_states=1,
                evaluation_seeds=(0,),
                policy_batch=1,
            )
        )

    try:
        assert evaluate(0, "a") == 0
        noted = read_json(tmp_path / "a" / "evaluation.json")
        assert noted["interface"] == fingerprint(contracts[0].interface)
        assert noted["provenance"] == fingerprint(contracts[0].provenance)
        with pytest.raises(ValueError, match=r"other settings:\n  provenance: expected"):
            evaluate(1, "a")
        assert evaluate(0, "b", reference="a") == 0
        assert read_json(tmp_path / "b" / "result.json")["success_gain"]["value"] == 0.0
        with pytest.raises(ValueError, match="reference: expected an evaluation with provenance"):
            evaluate(1, "c", reference="a")
        assert not (tmp_path / "c").exists()  # refused before an episode is run
        (tmp_path / "a" / "episodes.jsonl").write_text("")
        with pytest.raises(ValueError, match=r"1 are missing, the first: state adjust_bottle/train/0000, seed 0\. Run"):
            evaluate(0, "d", reference="a")
        with pytest.raises(ValueError, match="reference: expected another directory than --out"):
            evaluate(0, "b", reference="b")
    finally:
        for server in servers:
            server.stop(0)


def test_fresh_keeps_what_is_there_when_the_call_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    EVALUATION.note(tmp_path / "out", SETTINGS)
    (tmp_path / "out" / "episodes.jsonl").write_text("{}\n")
    assert main(["--fresh", "--out", str(tmp_path / "out"), "--initial-states", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
    assert (tmp_path / "out" / "episodes.jsonl").read_text() == "{}\n"


def test_a_world_model_that_nobody_judges_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = StubBackend(contract=adjust_bottle("world_model", "stub", {"judge": "none"}))
    server = start_environment_server(backend, None, ServerSettings())
    states = ROOT / "initial_states" / "train"
    try:
        paths = ["--out", str(tmp_path / "out"), "--initial-states", str(states), "--policy", str(tmp_path)]
        assert main(["--target", server.address, *paths]) == 1
    finally:
        server.stop(0)
    assert "is a world model without a reward server. Start it again with --reward" in capsys.readouterr().err
    assert backend.resets == []
    assert not (tmp_path / "out").exists()


def test_a_reference_is_whole_and_of_the_same_target(bandit: Any, tiny_policy: Any, tmp_path: Path) -> None:
    settings = {**SETTINGS, "initial_states_sha256": "s", "max_states": None, "interface": "i", "provenance": "p"}
    rows = evaluate_policy(bandit(), tiny_policy(), STATES, settings, tmp_path)
    found = read_json(tmp_path / "evaluation.json")
    assert reference_rows(tmp_path, found, found, STATES) == rows
    for name in ("interface", "provenance", "mode"):
        with pytest.raises(ValueError, match=f"with {name} = 'other'; got"):
            reference_rows(tmp_path, found, {**found, name: "other"}, STATES)
    earlier = {name: value for name, value in found.items() if name != "provenance"}
    with pytest.raises(ValueError, match="got nothing, it was made before that was recorded"):
        reference_rows(tmp_path, earlier, found, STATES)
    lines = (tmp_path / "episodes.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "episodes.jsonl").write_text("".join(lines[:-2]))
    with pytest.raises(ValueError, match=r"expected an episode for each of 10 states and seeds .*; 2 are missing"):
        reference_rows(tmp_path, found, found, STATES)
