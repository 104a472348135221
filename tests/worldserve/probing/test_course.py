"""What is read from the episode that succeeds, where the test motions are not drawn as in the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from worldserve.faults import open_client
from worldserve.probing import wiring
from worldserve.probing.finding import Finding, Verdict
from worldserve.probing.matrix import EXPECTED, questions
from worldserve.probing.probe import probe
from worldserve.probing.small import STATES, SmallServers
from worldserve.probing.world import probe_world_interface

FROM_THE_SUCCESS = ("gripper_sense", "normalisation", "timing")


def found(small: SmallServers, *faults: str) -> dict[str, Finding]:
    """The probes of the wiring for a target that draws no excursion and no fingers, but a success."""
    with open_client(small.simulator, faults, interface=probe_world_interface()) as client:
        report = probe(client, questions(STATES, small.known_frames, 1)[0], small.reference)
    sweeps = report.motion.sweeps.copy()
    sweeps[[6, 13]] = 0.0
    rough = dataclasses.replace(
        report.motion, sweeps=sweeps, levels=0 * report.motion.levels, onset=0 * report.motion.onset
    )
    return {finding.probe: finding for finding in wiring.inspect(report.run, rough, small.reference.motion)}


def test_a_clean_target_passes(small: SmallServers) -> None:
    findings = found(small)
    assert [findings[name].verdict for name in FROM_THE_SUCCESS] == [Verdict.PASS] * 3
    assert abs(float(findings["timing"].numbers["lag_frames"] or 0)) < 0.1
    assert float(findings["normalisation"].numbers["reach"] or 0) == pytest.approx(1.0, abs=0.05)
    assert float(findings["gripper_sense"].numbers["grasp_likeness"] or 0) > 0.9


@pytest.mark.parametrize("fault", ["gripper_sense", "normalisation_range", "action_offset", "frame_offset"])
def test_its_faults_are_found(small: SmallServers, fault: str) -> None:
    findings = found(small, fault)
    assert [name for name in FROM_THE_SUCCESS if findings[name].failed] == [EXPECTED[fault]]


@pytest.mark.parametrize("fault", ["arms_swapped", "joint_order", "units_degrees", "action_space", "delta_actions"])
def test_another_way_gives_no_verdict(small: SmallServers, fault: str) -> None:
    findings = found(small, fault)
    assert not [name for name in FROM_THE_SUCCESS if findings[name].failed]


def test_nothing_seen_is_no_verdict(small: SmallServers) -> None:
    reference = small.reference.motion
    assert reference is not None
    nothing = dataclasses.replace(reference, **{name: np.nan * maps for name, maps in vars(reference).items()})
    with open_client(small.simulator, interface=probe_world_interface()) as client:
        report = probe(client, questions(STATES, small.known_frames, 1)[0], small.reference)
    assert not [finding.probe for finding in wiring.inspect(report.run, nothing, reference) if finding.failed]
