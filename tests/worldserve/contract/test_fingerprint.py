"""Fingerprints change with any field, and with nothing else; differences name the fields."""

import dataclasses
import hashlib

import pytest

from worldserve.contract import (
    Difference,
    Observation,
    Provenance,
    TerminationRule,
    Timing,
    adjust_bottle_interface,
    canonical_json,
    differences,
    fingerprint,
)


def test_canonical_json_is_sorted_dense_and_shortest() -> None:
    provenance = Provenance("simulator", "tabletop", "0.1.0", {"renderer": "llvmpipe", "größe": "1"})
    assert canonical_json(provenance) == (
        '{"backend":"tabletop","facts":{"größe":"1","renderer":"llvmpipe"},"kind":"simulator","worldserve_version":"0.1.0"}'
    )
    assert fingerprint(provenance) == hashlib.sha256(canonical_json(provenance).encode()).hexdigest()


def test_whole_floats_and_integers_hash_alike() -> None:
    interface = adjust_bottle_interface()
    as_integer = dataclasses.replace(interface, timing=Timing(substep_ms=4))
    assert fingerprint(as_integer) == fingerprint(interface)


def test_equal_interfaces_do_not_differ() -> None:
    assert differences(adjust_bottle_interface(), adjust_bottle_interface()) == []


def test_swapped_arms_are_a_difference_of_names_and_arms() -> None:
    interface = adjust_bottle_interface()
    swapped = dataclasses.replace(
        interface,
        action=dataclasses.replace(
            interface.action, dimensions=interface.action.dimensions[7:] + interface.action.dimensions[:7]
        ),
    )
    found = differences(interface, swapped)
    assert fingerprint(swapped) != fingerprint(interface)
    assert found[0] == Difference("action.dimensions[0].name", '"left_joint_1"', '"right_joint_1"')
    assert {item.name.rpartition(".")[2] for item in found} == {"name", "arm"}
    assert len(found) == 28


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"observation": Observation(height=480)}, [Difference("observation.height", "96", "480")]),
        (
            {"termination": TerminationRule(limit_is="truncated", success_ends_episode=True)},
            [
                Difference("termination.limit_is", '"terminated"', '"truncated"'),
                Difference("termination.success_ends_episode", "false", "true"),
            ],
        ),
        ({"task": "lift_pot"}, [Difference("task", '"adjust_bottle"', '"lift_pot"')]),
    ],
)
def test_each_changed_field_is_named(change: dict, expected: list[Difference]) -> None:
    interface = adjust_bottle_interface()
    changed = dataclasses.replace(interface, **change)
    assert differences(interface, changed) == expected
    assert fingerprint(changed) != fingerprint(interface)


def test_a_field_that_one_side_lacks_is_absent() -> None:
    ours = Provenance("simulator", "tabletop", "0", {"renderer": "llvmpipe"})
    theirs = Provenance("simulator", "tabletop", "0", {"mesa": "25"})
    assert [str(item) for item in differences(ours, theirs)] == [
        'facts.renderer: expected "llvmpipe", got (absent)',
        'facts.mesa: expected (absent), got "25"',
    ]


def test_non_finite_numbers_have_no_fingerprint() -> None:
    broken = adjust_bottle_interface()
    object.__setattr__(broken.timing, "substep_ms", float("nan"))
    with pytest.raises(ValueError, match="finite"):
        fingerprint(broken)
