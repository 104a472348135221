"""The tabletop scene: rules, inputs, frames, and the same bits every time."""

from __future__ import annotations

import hashlib
import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from services.sim_server.tabletop import CameraSettings, SceneParameters, TabletopScene, home, joint_limits, plan_expert
from worldserve.contract import execute
from worldserve.contract.default import adjust_bottle_interface
from worldserve.kinematics import arm_forward_kinematics

OFFSETS = (1, 60, 100, 140)


def expert(seed: int, scale: float = 0.0) -> NDArray[np.float32]:
    with TabletopScene(SceneParameters.from_seed(seed), render=False) as scene:
        return plan_expert(scene, scale, np.random.Generator(np.random.PCG64([seed, 7])))


def wild(seed: int, count: int = 150) -> NDArray[np.float32]:
    """Uniform targets through the contract's clipping: the hardest thing a policy may send."""
    limits = joint_limits()
    requested = np.random.default_rng(seed).uniform(limits[:, 0], limits[:, 1], (count, 14)).astype(np.float32)
    return execute(requested, home(), adjust_bottle_interface().action).actions


def digest(seed: int, actions: NDArray[np.float32]) -> str:
    """One episode's states (every ten actions), frames and outcome as a hash."""
    with TabletopScene(SceneParameters.from_seed(seed)) as scene:
        hashed = hashlib.sha256(scene.observe().tobytes() + scene.state().tobytes())
        for start in range(0, len(actions), 10):
            part = actions[start : start + 10]
            outcome = scene.run_actions(part, [offset - start for offset in OFFSETS if start < offset <= start + 10])
            hashed.update(outcome.frames.tobytes() + scene.state().tobytes())
            hashed.update(repr((outcome.success_latched, outcome.first_success_action, outcome.diagnostics)).encode())
    return hashed.hexdigest()


def reference_digests() -> list[str]:
    """Digests of a clean, a failing and a wild episode; also what a fresh process is asked for."""
    return [digest(1, expert(1)), digest(3, expert(3, 2.5)), digest(2, wild(2))]


@pytest.fixture(scope="module")
def reference() -> list[str]:
    return reference_digests()


def test_same_bits_after_other_episodes_in_one_process(reference: list[str]) -> None:
    for seed in range(20, 24):
        digest(seed, wild(seed, 60))
    assert reference_digests() == reference


def test_same_bits_in_another_process(reference: list[str]) -> None:
    # Not a Pool: when its process dies it starts another and waits for ever; this one raises BrokenProcessPool.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        assert executor.submit(reference_digests).result(timeout=300) == reference


def test_same_bits_among_interleaved_scenes() -> None:
    plans = {seed: wild(seed, 100) if seed % 2 else expert(seed)[:100] for seed in range(5)}
    alone = {}
    for seed, plan in plans.items():
        with TabletopScene(SceneParameters.from_seed(seed)) as scene:
            frames = [scene.run_actions(plan[start : start + 20], [20]).frames for start in range(0, 100, 20)]
            alone[seed] = (np.concatenate(frames).tobytes(), scene.state().tobytes())
    scenes = {seed: TabletopScene(SceneParameters.from_seed(seed)) for seed in plans}
    together: dict[int, list[NDArray[np.uint8]]] = {seed: [] for seed in plans}
    for start in range(0, 100, 20):
        for seed, scene in scenes.items():
            together[seed].append(scene.run_actions(plans[seed][start : start + 20], [20]).frames)
    for seed, scene in scenes.items():
        assert (np.concatenate(together[seed]).tobytes(), scene.state().tobytes()) == alone[seed], seed
        scene.close()


@pytest.mark.parametrize("make", [lambda: expert(3, 2.5), lambda: wild(8)], ids=["failing expert", "wild"])
def test_rendering_changes_no_physics(make: Callable[[], NDArray[np.float32]]) -> None:
    actions = make()
    states = []
    for render, offsets in ((False, []), (True, []), (True, range(1, len(actions) + 1))):
        with TabletopScene(SceneParameters.from_seed(3), render=render) as scene:
            scene.run_actions(actions, list(offsets))
            states.append(scene.state().tobytes())
    assert states[0] == states[1] == states[2]


def test_how_a_run_is_cut_into_chunks_changes_nothing() -> None:
    actions = expert(4)[:100]
    with TabletopScene(SceneParameters.from_seed(4), render=False) as whole:
        whole.run_actions(actions)
        with TabletopScene(SceneParameters.from_seed(4), render=False) as parts:
            for start in range(0, 100, 7):
                parts.run_actions(actions[start : start + 7])
            assert parts.state().tobytes() == whole.state().tobytes()


@pytest.mark.parametrize("arm", ["left", "right"])
def test_links_stand_where_forward_kinematics_says(arm: str) -> None:
    with TabletopScene(SceneParameters.from_seed(0), render=False) as scene:
        target = home()
        target[7 * (arm == "right") :][:6] = [0.4, 1.2, 0.9, -0.4, 0.3, 0.5]
        actions = execute(np.repeat(target[None], 60, axis=0), home(), adjust_bottle_interface().action).actions
        scene.run_actions(actions)
        measured = scene.robot.joint_positions(arm)
        np.testing.assert_allclose(measured, target[7 * (arm == "right") :][:6], atol=1e-3)
        links = {link.name: link for link in scene.robot.articulations[arm].links}
        position, rotation = arm_forward_kinematics(arm, measured)
        pose = links[f"{arm}_link_6"].entity_pose.to_transformation_matrix()
        np.testing.assert_allclose(pose[:3, 3], position, atol=1e-5)
        np.testing.assert_allclose(pose[:3, :3], rotation, atol=1e-5)


def test_reset_state_is_home_with_the_bottle_at_rest_where_asked() -> None:
    parameters = SceneParameters(1, 13, 0.1, -0.1, 0.3)
    with TabletopScene(parameters) as scene:
        np.testing.assert_array_equal(scene.proprioception(), home())
        position, rotation = scene.bottle_pose()
        np.testing.assert_allclose(position, [0.1, -0.1, 0.768], atol=1e-3)
        np.testing.assert_allclose(rotation[:, 0], [-np.cos(0.3), -np.sin(0.3), 0.0], atol=2e-3)
        before = scene.bottle_pose()[0]
        frame = scene.run_actions(np.repeat(home()[None], 50, axis=0), [50]).frames[0]
        assert np.linalg.norm(scene.bottle_pose()[0] - before) < 5e-4
        assert frame.shape == (96, 128, 3)
        assert frame.dtype == np.uint8


@pytest.mark.parametrize(("model", "channel"), [(13, 0), (16, 1)], ids=["red label", "green"])
def test_the_lying_bottle_is_plain_to_see(model: int, channel: int) -> None:
    camera = CameraSettings.named("default")
    with TabletopScene(SceneParameters(1, model, 0.1, -0.1, 0.0), camera) as scene:
        column, row = camera.project(scene.bottle_pose()[0][None])[0].astype(int)
        frame = scene.observe().astype(int)
    patch = frame[row - 3 : row + 3, column - 3 : column + 3].mean(axis=(0, 1))
    others = np.delete(patch, channel)
    assert patch[channel] > others.max() + 40


def test_success_is_robotwins_rule_and_stays_latched() -> None:
    actions = expert(6)
    with TabletopScene(SceneParameters.from_seed(6), render=False) as scene:
        side = scene.parameters.side
        first = None
        for index in range(200):
            outcome = scene.run_actions(actions[index : index + 1])
            rule = side * outcome.diagnostics["bottle_x_m"] > 0.15 and outcome.diagnostics["bottle_z_m"] > 0.9
            if rule and first is None:
                first = index + 1
            assert outcome.success_latched == (first is not None)
        assert outcome.first_success_action == first
        # Open the gripper: the bottle falls, the latch stays.
        release = np.repeat(actions[-1:], 40, axis=0)
        release[:, [6, 13]] = 1.0
        outcome = scene.run_actions(release)
        assert outcome.diagnostics["bottle_z_m"] < 0.85
        assert outcome.diagnostics["success_now"] == 0.0
        assert outcome.success_latched
        assert outcome.first_success_action == first


def test_the_wrong_side_is_no_success() -> None:
    """The same lift, judged for the other tag: |x| counts on the tag's side only."""
    actions = expert(6)
    parameters = SceneParameters.from_seed(6)
    other = SceneParameters(
        1 - parameters.tag, parameters.bottle_model, parameters.x_m, parameters.y_m, parameters.yaw_rad
    )
    with TabletopScene(parameters, render=False) as scene:
        object.__setattr__(scene, "parameters", other)
        outcome = scene.run_actions(actions)
        assert outcome.diagnostics["max_bottle_height_m"] > 0.95
        assert not outcome.success_latched


def test_wild_actions_stay_finite_and_near_the_table() -> None:
    with TabletopScene(SceneParameters.from_seed(11), render=False) as scene:
        scene.run_actions(wild(11, 200))
        assert np.isfinite(scene.state()).all()
        assert np.linalg.norm(scene.bottle_pose()[0]) < 3.0


def bad(change: Callable[[NDArray[np.float32]], Any]) -> Any:
    return change(np.repeat(home()[None], 3, axis=0))


def with_value(value: float) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    def change(actions: NDArray[np.float32]) -> NDArray[np.float32]:
        actions[1, 2] = value
        return actions

    return change


@pytest.mark.parametrize(
    ("change", "offsets", "message"),
    [
        (lambda a: a.astype(np.float64), [], "actions: expected a float32 array; got float64"),
        (lambda a: a[:, :13], [], "actions: expected shape (n, 14); got (3, 13)"),
        (with_value(float("nan")), [], "actions: expected finite numbers"),
        (with_value(3.5), [], "actions[1, 2]: expected a value in"),
        (lambda a: a, [0], "frame_offsets: expected strictly increasing integers in 1..3; got [0]"),
        (lambda a: a, [2, 2], "frame_offsets: expected strictly increasing"),
        (lambda a: a, [4], "frame_offsets: expected strictly increasing"),
        (lambda a: a, [1], "made with render=False"),
    ],
)
def test_bad_input_is_refused_and_nothing_runs(change: Callable[..., Any], offsets: list[int], message: str) -> None:
    with TabletopScene(SceneParameters.from_seed(0), render=False) as scene:
        before = scene.state().tobytes()
        with pytest.raises(ValueError, match=re.escape(message)):
            scene.run_actions(bad(change), offsets)
        assert scene.state().tobytes() == before
        assert scene.elapsed_actions == 0


def test_a_closed_scene_says_so_and_closes_again() -> None:
    scene = TabletopScene(SceneParameters.from_seed(0), render=False)
    scene.close()
    scene.close()
    with pytest.raises(RuntimeError, match="it was closed"):
        scene.run_actions(np.repeat(home()[None], 1, axis=0))


def test_limits_are_the_contracts() -> None:
    dimensions = adjust_bottle_interface().action.dimensions
    np.testing.assert_array_equal(
        joint_limits(), np.array([(dimension.low, dimension.high) for dimension in dimensions], np.float32)
    )
