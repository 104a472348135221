"""The contract's constructors refuse what no backend could honour, by name."""

import dataclasses
from typing import Any

import pytest

from worldserve.contract import (
    ActionDimension,
    ActionLayout,
    Contract,
    FrameConvention,
    Interface,
    Observation,
    Provenance,
    RewardRule,
    TerminationRule,
    Timing,
    adjust_bottle,
    adjust_bottle_interface,
    contract_from_mapping,
    contract_to_mapping,
    from_yaml,
    to_yaml,
)

DIMENSION = {"name": "left_gripper", "unit": "fraction", "low": 0.0, "high": 1.0, "max_change": 1.0, "arm": "left"}


@pytest.mark.parametrize(
    ("kind", "arguments", "complaint"),
    [
        (ActionDimension, DIMENSION | {"unit": "degree"}, "left_gripper.unit: expected one of rad, fraction"),
        (ActionDimension, DIMENSION | {"arm": "middle"}, "left_gripper.arm: expected one of left, right"),
        (ActionDimension, DIMENSION | {"low": 1.0}, "expected finite low < high"),
        (ActionDimension, DIMENSION | {"high": float("nan")}, "expected finite low < high"),
        (ActionDimension, DIMENSION | {"max_change": 0.0}, "max_change: expected a positive finite number"),
        (ActionLayout, {"dimensions": ()}, "action.dimensions: expected at least one"),
        (ActionLayout, {"dimensions": (ActionDimension(**DIMENSION),) * 2}, "each name once"),  # type: ignore[arg-type]
        (Timing, {"retiming": "some"}, "timing.retiming: expected one of none, per_action, per_chunk"),
        (Observation, {"height": 0}, "observation.height: expected a positive"),
        (TerminationRule, {"limit_is": "done"}, "termination.limit_is: expected one of terminated, truncated"),
        (RewardRule, {"first_frame": 100, "last_frame": 50}, "expected 0 <= first_frame <= last_frame"),
        (Provenance, {"kind": "robot", "backend": "x", "worldserve_version": "0"}, "provenance.kind: expected one of"),
    ],
)
def test_impossible_values_are_refused_by_name(kind: type, arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        kind(**arguments)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"termination": TerminationRule(limit_actions=190)}, "expected a multiple of timing.chunk_actions"),
        ({"frames": FrameConvention(frames_per_episode=200)}, "expected limit_actions \\+ 1 = 201; got 200"),
        ({"reward": RewardRule(last_frame=201)}, "expected at most limit_actions = 200; got 201"),
    ],
)
def test_an_interface_must_agree_with_itself(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(adjust_bottle_interface(), **change)


def test_the_default_task_is_the_one_of_the_design() -> None:
    interface = adjust_bottle_interface()
    assert [dimension.name for dimension in interface.action.dimensions] == [
        *(f"left_joint_{joint}" for joint in range(1, 7)),
        "left_gripper",
        *(f"right_joint_{joint}" for joint in range(1, 7)),
        "right_gripper",
    ]
    assert interface.action_dimensions == 14
    assert interface.chunks_per_episode == 4
    assert interface.termination == TerminationRule(200, "terminated", False)
    assert interface.reward == RewardRule("verdict", 51, 200, "peak", "last_action")


def test_facts_are_sorted_and_cannot_be_changed() -> None:
    provenance = Provenance("simulator", "tabletop", "0", {"b": "2", "a": "1"})
    assert list(provenance.facts) == ["a", "b"]
    with pytest.raises(TypeError):
        provenance.facts["a"] = "3"  # type: ignore[index]


def test_mapping_and_yaml_read_back_equal() -> None:
    contract = adjust_bottle("world_model", "bwm-mini", {"history_noise": "0.1", "sampler_steps": "2"})
    assert contract_from_mapping(contract_to_mapping(contract)) == contract
    assert from_yaml(to_yaml(contract)) == contract


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("interface", "timing", "chunk_actions"), "50", "contract.interface.timing.chunk_actions: expected int"),
        (("interface", "timing", "chunk_actions"), True, "contract.interface.timing.chunk_actions: expected int"),
        (("interface", "reset", "keyframe_starts"), 0, "contract.interface.reset.keyframe_starts: expected bool"),
        (("interface", "timing", "speed"), 1, "contract.interface.timing: .* unknown \\['speed'\\]"),
        (("interface", "action", "dimensions"), "left", "contract.interface.action.dimensions: expected a list"),
        (("interface", "action"), None, "contract.interface.action: expected a mapping"),
    ],
)
def test_a_bad_field_is_named(path: tuple[str, ...], value: object, complaint: str) -> None:
    mapping: Any = contract_to_mapping(adjust_bottle("simulator", "tabletop", {}))
    inner = mapping
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ValueError, match=complaint):
        contract_from_mapping(mapping)


def test_a_missing_field_is_named() -> None:
    mapping = contract_to_mapping(adjust_bottle("simulator", "tabletop", {}))
    del mapping["interface"]["reward"]
    with pytest.raises(ValueError, match=r"contract.interface: .* missing \['reward'\]"):
        contract_from_mapping(mapping)


def test_a_contract_is_its_two_parts() -> None:
    contract = adjust_bottle("reward_model", "frame-classifier", {"threshold": "0.5"})
    assert contract == Contract(contract.interface, contract.provenance)
    assert isinstance(contract.interface, Interface)
