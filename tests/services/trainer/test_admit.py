"""Admission: one verdict, from measures that belong together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.trainer.admit import main
from worldserve.files import file_sha256

GATES = """
gates:
  fidelity.target.fake_success: {at_most: 0.15, minimum_count: 200}
  forks.unseen.above_floor: {at_most: 0.25}
  mismatch.excess: {at_most: 0.10, read: high, minimum_count: 300}
  history.outcome_difference: {at_least: 0.05, read: low}
"""
IDENTITY = {
    "target_weights_sha256": "a" * 64, "target_provenance": "b" * 64, "reference_provenance": "c" * 64,
    "reward_provenance": "d" * 64, "interface": "e" * 64,
    "target_drawn": {"history_noise": "0.05", "sampler_sigmas": "1.0,0.5", "pose_clip": "true", "window": "61"},
}  # fmt: skip


def interval(value: float, half: float = 0.04) -> dict[str, Any]:
    return {"value": value, "low": value - half, "high": value + half, "count": 100, "confidence": 0.9}


@pytest.fixture
def results(tmp_path: Path) -> dict[str, Any]:
    """Measures that meet every gate."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"weights")
    policy = file_sha256(tmp_path / "policy" / "model.safetensors")
    return {
        "fidelity": {
            "target": {"fake_success": interval(0.14)}, "counts": {"failures": 200}, "failed": [], "identity": IDENTITY,
        },
        "forks-unseen": {
            "split": "unseen", "shifts_mm": {"x": 3.24, "y": 4.63}, "identity": IDENTITY,
            "mixed": {
                "above_floor": interval(0.2), "failures": 80, "floor_failures": {"episodes": 60, "states": 20},
            },
        },
        "mismatch": {
            "excess": interval(0.05), "policy": {"replayed": 300}, "baseline": {"replayed": 320},
            "identity": {**IDENTITY, "policy_model_sha256": policy, "baseline_model_sha256": "f" * 64},
        },
        "history": {
            "outcome_difference": interval(0.1),
            "identity": {"target_weights_sha256": "a" * 64, "sampler_sigmas": [1.0, 0.5], "history_noise": 0.05, "reward": {"provenance_fingerprint": "d" * 64}},
        },
    }  # fmt: skip


@pytest.fixture
def admit(tmp_path: Path, results: dict[str, Any]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Writes the results and runs the command; returns the exit status and the verdict."""

    def command(*more: str, gates: str = GATES, policy: bool = True) -> tuple[int, dict[str, Any]]:
        (tmp_path / "gates.yaml").write_text(gates)
        flags = ["--gates", str(tmp_path / "gates.yaml")]
        flags += ["--policy", str(tmp_path / "policy")] if policy else []
        for name, result in results.items():
            directory = tmp_path / name
            directory.mkdir(exist_ok=True)
            (directory / "result.json").write_text(json.dumps(result))
            file = directory / "result.json" if name == "history" else directory
            flags += [f"--{name.partition('-')[0]}", str(file)]
        out = tmp_path / "out" / "verdict.json"
        status = main([*flags, "--out", str(out), *more])
        return status, json.loads(out.read_text()) if out.exists() else {}

    return command


def test_what_meets_every_gate_is_admitted(admit: Any, tmp_path: Path, capsys: Any) -> None:
    status, verdict = admit()
    assert (status, verdict["admitted"], verdict["reasons"], verdict["notes"]) == (0, True, [], [])
    assert [row["outcome"] for row in verdict["gates"]] == ["pass"] * 4
    assert [row["figure"] for row in verdict["gates"]] == [
        line.split(":")[0].strip() for line in GATES.splitlines()[2:]
    ]
    assert verdict["gates_file"]["sha256"] == file_sha256(tmp_path / "gates.yaml")
    assert verdict["measures"]["mismatch"]["sha256"] == file_sha256(tmp_path / "mismatch" / "result.json")
    assert set(verdict["measures"]) == {"fidelity", "mismatch", "forks.unseen", "history"}
    shown = capsys.readouterr().out
    assert "ADMITTED" in shown
    assert "REFUSED" not in shown


def test_a_gate_that_is_not_met_refuses(admit: Any, results: Any, capsys: Any) -> None:
    results["mismatch"]["excess"] = interval(0.07)  # its high end is 0.11
    status, verdict = admit()
    assert (status, verdict["admitted"]) == (1, False)
    assert verdict["reasons"] == ["mismatch.excess: high 0.110 is not <= 0.1"]
    assert "REFUSED for 1 reason:\n  mismatch.excess: high 0.110 is not <= 0.1" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["fidelity", "mismatch", "forks-unseen"])
def test_what_was_not_measured_refuses_and_names_the_command(name: str, admit: Any, results: Any) -> None:
    del results[name]
    status, verdict = admit()
    assert status == 1
    [reason] = verdict["reasons"]
    assert f"not measured; measure it with `worldserve {name.partition('-')[0]}" in reason


def test_the_forks_of_another_split_are_not_these(admit: Any, results: Any) -> None:
    results["forks-unseen"]["split"] = "train"
    status, verdict = admit()
    assert status == 1
    [reason] = verdict["reasons"]
    assert "forks.unseen.above_floor: not measured; measure it with `worldserve forks DATA --split unseen" in reason


def test_a_figure_that_is_not_finite_refuses(admit: Any, results: Any) -> None:
    results["forks-unseen"]["mixed"]["above_floor"]["value"] = float("nan")
    status, verdict = admit()
    assert status == 1
    assert "forks.unseen.above_floor: value: expected a finite number; got nan" in verdict["reasons"][0]


@pytest.mark.parametrize(
    ("measure", "field", "value", "reason"),
    [
        ("fidelity", "target_weights_sha256", "9" * 64, "world model weights: expected one (target_weights_sha256); got fidelity 999999999999, mismatch aaaaaaaaaaaa"),
        ("history", "target_weights_sha256", "9" * 64, "world model weights: expected one"),
        ("forks-unseen", "reward_provenance", "9" * 64, "reward model: expected one (reward_provenance)"),
        ("history", "reward", {"provenance_fingerprint": "9" * 64}, "reward model: expected one"),
        ("mismatch", "interface", "9" * 64, "interface: expected one"),
        ("mismatch", "reward_provenance", "", "reward model: mismatch does not say of which"),
        ("history", "target_weights_sha256", None, "world model weights: history does not say of which"),
        ("mismatch", "policy_model_sha256", "9" * 64, "policy: expected the mismatch of"),
    ],
)  # fmt: skip
def test_measures_of_other_things_refuse_though_every_gate_is_met(
    measure: str, field: str, value: Any, reason: str, admit: Any, results: Any
) -> None:
    results[measure]["identity"] = {**results[measure]["identity"], field: value}
    status, verdict = admit()
    assert status == 1
    assert [row["outcome"] for row in verdict["gates"]] == ["pass"] * 4
    assert len(verdict["reasons"]) == 1
    assert reason in verdict["reasons"][0]


@pytest.mark.parametrize("shifts", [{"x": 50.0, "y": 50.0}, {"x": 3.24, "y": 5.0}, None])
def test_a_floor_of_other_shifts_than_half_a_pixel_refuses(shifts: Any, admit: Any, results: Any) -> None:
    results["forks-unseen"]["shifts_mm"] = shifts
    status, verdict = admit()
    assert status == 1
    [reason] = verdict["reasons"]
    assert reason.startswith("forks.unseen: expected a floor at shifts of half a pixel, {'x': 3.24, 'y': 4.63} mm")


def test_a_measure_with_failed_episodes_refuses(admit: Any, results: Any) -> None:
    results["fidelity"]["failed"] = ["episode-3: UNAVAILABLE"]
    status, verdict = admit()
    assert status == 1
    assert verdict["reasons"] == ["fidelity: episodes failed; the same command goes on with these"]


def test_servers_that_draw_the_same_but_differ_otherwise_are_said(admit: Any, results: Any) -> None:
    results["fidelity"]["identity"] = {**IDENTITY, "target_provenance": "9" * 64}
    status, verdict = admit()
    assert status == 0
    assert "target servers differ in provenance" in verdict["notes"][0]


@pytest.mark.parametrize("fact", ["sampler_sigmas", "history_noise", "pose_clip", "window", "not_stated_elsewhere"])
def test_a_world_model_that_was_served_with_other_settings_is_another(fact: str, admit: Any, results: Any) -> None:
    drawn = {**IDENTITY["target_drawn"], fact: "other"}  # type: ignore[dict-item]
    results["fidelity"]["identity"] = {**IDENTITY, "target_drawn": drawn}
    status, verdict = admit()
    assert status == 1
    [reason] = verdict["reasons"]
    assert reason.startswith(f"drawing: expected one {fact}; got fidelity other, mismatch")


@pytest.mark.parametrize(("fact", "value"), [("sampler_sigmas", [1.0, 0.75]), ("history_noise", 0.2)])
def test_a_history_check_is_of_the_same_settings_as_far_as_it_states_them(
    fact: str, value: Any, admit: Any, results: Any
) -> None:
    results["history"]["identity"][fact] = value
    status, verdict = admit()
    assert status == 1
    [reason] = verdict["reasons"]
    assert reason.startswith(f"drawing: expected one {fact}; got ")
    del results["history"]["identity"][fact]
    assert admit()[0] == 0


def test_a_measure_that_does_not_say_how_it_was_served_refuses(admit: Any, results: Any) -> None:
    results["mismatch"]["identity"].pop("target_drawn")
    status, verdict = admit()
    assert status == 1
    [reason] = verdict["reasons"]
    assert reason.startswith("drawing: mismatch does not say with which settings")


def test_a_policy_against_itself_meets_no_gate(admit: Any, results: Any) -> None:
    identity = results["mismatch"]["identity"]
    identity["baseline_model_sha256"] = identity["policy_model_sha256"]
    status, verdict = admit()
    assert status == 1
    [reason] = verdict["reasons"]
    assert reason.startswith("mismatch.excess: policy and baseline are the same weights")
    assert [row["outcome"] for row in verdict["gates"]] == ["pass", "pass", "fail", "pass"]


@pytest.mark.parametrize("figure", ["mismatch.excess", "mismatch.policy.mismatch"])
def test_a_gate_on_the_mismatch_needs_the_policy_that_it_is_of(figure: str, admit: Any, results: Any) -> None:
    results["mismatch"]["policy"]["mismatch"] = interval(0.05)
    status, verdict = admit(gates=f"gates: {{{figure}: {{at_most: 0.5}}}}", policy=False)
    assert status == 1
    assert verdict["reasons"] == [f"{figure}: no policy was named that it is the mismatch of; give --policy"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda at: (at / "mismatch" / "result.json").unlink(), "mismatch: expected the result of a finished measure; there is no"),
        (lambda at: (at / "fidelity" / "result.json").write_text("{"), "fidelity: expected JSON in"),
        (lambda at: (at / "fidelity" / "result.json").write_text("{}"), "fidelity: expected the result of `worldserve fidelity"),
        (lambda at: (at / "forks-unseen" / "result.json").write_text('{"identity": {}, "split": "tset"}'), "forks: expected a split of train or unseen"),
        (lambda at: (at / "gates.yaml").write_text("gates: {x: {}}"), "gates: expected keys of"),
        (lambda at: (at / "policy" / "model.safetensors").unlink(), "policy: expected the directory of a policy"),
    ],
)  # fmt: skip
def test_unusable_input_is_status_2(change: Any, message: str, admit: Any, tmp_path: Path, capsys: Any) -> None:
    admit()
    change(tmp_path)
    flags = ["--gates", str(tmp_path / "gates.yaml"), "--policy", str(tmp_path / "policy")]
    flags += [part for name in ("fidelity", "mismatch") for part in (f"--{name}", str(tmp_path / name))]
    assert main([*flags, "--forks", str(tmp_path / "forks-unseen"), "--out", str(tmp_path / "v.json")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "v.json").exists()


def test_a_split_given_twice_is_unusable(admit: Any, tmp_path: Path, capsys: Any) -> None:
    status, _ = admit("--forks", str(tmp_path / "forks-unseen"))
    assert status == 2
    assert "expected one directory a split" in capsys.readouterr().err
