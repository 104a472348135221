"""Gates: a strict file, and one judgement a gate that says why."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest

from services.trainer.gates import FIGURES, Gate, judge, load_gates

ROOT = Path(__file__).parents[3]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "gates.yaml"
    path.write_text(text)
    return path


def test_the_shipped_gates_are_the_issues_targets() -> None:
    gates = load_gates(ROOT / "gates" / "mini.yaml")
    assert gates.sha256 == hashlib.sha256((ROOT / "gates" / "mini.yaml").read_bytes()).hexdigest()
    assert gates.confidence == 0.9
    assert {gate.figure: (gate.bound, gate.read, gate.minimum_count, gate.minimum_states) for gate in gates.gates} == {
        "fidelity.reference.fake_success": ("<= 0.03", "value", 200, 50),
        "fidelity.reference.recall": (">= 0.99", "value", 200, 50),
        "fidelity.target.fake_success": ("<= 0.15", "value", 200, 50),
        "fidelity.target.recall": (">= 0.97", "value", 200, 50),
        "forks.train.above_floor": ("<= 0.15", "value", 200, 30),
        "forks.unseen.above_floor": ("<= 0.25", "value", 200, 30),
        "mismatch.excess": ("<= 0.1", "high", 300, 50),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gates: {fidelity.target.recal: {at_least: 1}}", r"gates: expected keys of .*fidelity.target.recall.*; got fidelity.target.recal$"),
        ("gates: {mismatch.excess: {at_mots: 1}}", r"mismatch.excess: expected keys of at_most, at_least, .*; got at_mots"),
        ("gates: {mismatch.excess: {at_most: '0.1'}}", r"mismatch.excess: at_most: expected a finite number; got '0.1'"),
        ("gates: {mismatch.excess: {at_most: .nan}}", r"at_most: expected a finite number; got nan"),
        ("gates: {mismatch.excess: {at_most: true}}", r"at_most: expected a finite number; got True"),
        ("gates: {mismatch.excess: {read: high}}", r"expected either at_most or at_least; got neither"),
        ("gates: {mismatch.excess: {at_most: 1, at_least: 0}}", r"got at_most and at_least"),
        ("gates: {mismatch.excess: {at_most: 1, read: low}}", r"read: expected 'value' or 'high', .*; got 'low'"),
        ("gates: {fidelity.target.recall: {at_least: 1, read: high}}", r"read: expected 'value' or 'low', .*; got 'high'"),
        ("gates: {mismatch.excess: {at_most: 1, minimum_count: 0}}", r"minimum_count: expected a whole number of at least 1; got 0"),
        ("gates: {mismatch.excess: {at_most: 1, minimum_states: 2.5}}", r"minimum_states: expected a whole number .*; got 2.5"),
        ("gates: {mismatch.excess: 0.1}", r"mismatch.excess: expected a mapping .*; got 0.1"),
        ("gates: {mismatch.excess: {at_most: 1}, mismatch.excess: {at_most: 0}}", r"expected every key once; got 'mismatch.excess' twice"),
        ("gates: {}", r"gates: expected at least one"),
        ("confidence: 1.5\ngates: {mismatch.excess: {at_most: 1}}", r"confidence: expected a number between 0 and 1; got 1.5"),
        ("confidance: 0.9\ngates: {mismatch.excess: {at_most: 1}}", r"expected keys of confidence, gates; got confidance"),
        ("- 1", r"expected a mapping"),
        ("gates: {", r"expected YAML"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_as_written_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_gates(written(tmp_path, text))


def test_no_file_says_which_one_there_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gates/mini.yaml"):
        load_gates(tmp_path / "none.yaml")


def interval(**fields: Any) -> dict[str, Any]:
    return {"value": 0.10, "low": 0.05, "high": 0.15, "count": 40, "confidence": 0.9, **fields}


def result(found: Any, failures: Any = 250) -> dict[str, Any]:
    return {"target": {"fake_success": found}, "counts": {"failures": failures}}


def gate(**fields: Any) -> Gate:
    default = {"at_most": 0.12, "at_least": None, "read": "value", "minimum_count": 200, "minimum_states": 30}
    return Gate("fidelity.target.fake_success", **{**default, **fields})


@pytest.mark.parametrize(
    ("gate", "result", "outcome", "why"),
    [
        (gate(), result(interval()), "pass", ""),
        (gate(at_most=0.10), result(interval()), "pass", ""),  # the bound is included
        (gate(at_most=0.09), result(interval()), "fail", "value 0.100 is not <= 0.09"),
        (gate(read="high"), result(interval()), "fail", "high 0.150 is not <= 0.12"),
        (gate(at_most=0.15, read="high"), result(interval()), "pass", ""),
        (gate(at_most=None, at_least=0.10), result(interval()), "pass", ""),
        (gate(at_most=None, at_least=0.11), result(interval()), "fail", "value 0.100 is not >= 0.11"),
        (gate(at_most=None, at_least=0.06, read="low"), result(interval()), "fail", "low 0.050 is not >= 0.06"),
        (gate(), result(interval(), failures=199), "fail", "it rests on 199 episodes and not on 200"),
        (gate(), result(interval(), failures=None), "fail", "it rests on an unknown number of episodes and not on 200"),
        (gate(), result(interval(count=29)), "fail", "it rests on 29 states and not on 30"),
        (gate(), result(interval(confidence=0.5)), "fail", "its interval is at 0.5 and not at 0.9"),
        (gate(), result(interval(confidence=0.95)), "pass", ""),
        (gate(), None, "missing", "not measured; measure it with `worldserve fidelity`"),
        (gate(), {"target": {}}, "missing", "the result has no target.fake_success; measure it with `worldserve fidelity`"),
        (gate(), {"counts": {"failures": 0}}, "missing", "the data had none of its episodes (counts.failures is 0); measure it with `worldserve fidelity` on data that have some"),
        (gate(), result(None), "missing", "the result has no target.fake_success; measure it with `worldserve fidelity`"),
        (gate(), result(interval(value=math.nan)), "fail", "value: expected a finite number; got nan; measure it again with `worldserve fidelity`"),
        (gate(), result(interval(high=None)), "fail", "high: expected a finite number; got None; measure it again with `worldserve fidelity`"),
        (gate(), result(interval(low=math.inf)), "fail", "low: expected a finite number; got inf; measure it again with `worldserve fidelity`"),
        (gate(), result(interval(count=True)), "fail", "count: expected a whole number; got True; measure it again with `worldserve fidelity`"),
        (gate(), result(interval(low=0.2)), "fail", "low, high: expected low <= high; measure it again with `worldserve fidelity`"),
    ],
)  # fmt: skip
def test_a_gate_is_judged_with_its_reason(gate: Gate, result: Any, outcome: str, why: str) -> None:
    found = judge(gate, result, "worldserve fidelity", 0.9)
    assert (found.outcome, found.why) == (outcome, why)


def test_all_reasons_are_named_at_once() -> None:
    found = judge(gate(at_most=0.01), result(interval(count=1), failures=2), "worldserve fidelity", 0.9)
    assert found.why.split("; ") == [
        "value 0.100 is not <= 0.01",
        "it rests on 2 episodes and not on 200",
        "it rests on 1 states and not on 30",
    ]


def test_the_excess_rests_on_the_checkpoint_with_fewer_replays() -> None:
    wanted = Gate("mismatch.excess", 0.5, None, "value", 300, 1)
    both = {"excess": interval(), "policy": {"replayed": 310}, "baseline": {"replayed": 299}}
    assert judge(wanted, both, "x", 0.9).why == "it rests on 299 episodes and not on 300"


@pytest.mark.parametrize(
    ("failures", "floor", "why"),
    [
        (200, {"episodes": 200, "states": 30}, ""),
        (200, {"episodes": 3, "states": 2}, "it rests on 3 episodes and not on 200"),
        (199, {"episodes": 200, "states": 30}, "it rests on 199 episodes and not on 200"),
        (200, None, "it rests on an unknown number of episodes and not on 200"),
    ],
)
def test_above_the_floor_rests_on_the_failures_of_the_floor_too(failures: int, floor: Any, why: str) -> None:
    wanted = Gate("forks.train.above_floor", 0.15, None, "value", 200, 0)
    mixed = {"above_floor": interval(), "failures": failures, "floor_failures": floor}
    assert judge(wanted, {"mixed": mixed}, "x", 0.9).why == why


def test_every_figure_is_of_a_measure_that_admit_knows() -> None:
    from services.trainer.admit import COMMANDS

    assert {figure.measure for figure in FIGURES.values()} == set(COMMANDS)
