"""The small world does what the probes need of a world."""

from __future__ import annotations

import numpy as np

from worldserve.messages import BackendStep, ResetItem, ResetReply
from worldserve.probing.world import ProbeWorld, success_actions


def played(world: ProbeWorld, actions: np.ndarray, name: str = "a", seed: int = 0) -> tuple[np.ndarray, bool | None]:
    """The last frame of an episode, and its success."""
    [opened] = world.reset([ResetItem(name, "probe/state/0003", seed)])
    assert isinstance(opened, ResetReply)
    for index in range(4):
        chunk = actions[50 * index : 50 * index + 50]
        [outcome] = world.step([BackendStep(name, index, 50 * index, chunk, (50 * index + 50,))])
    return outcome.frames[-1], outcome.success


def still() -> np.ndarray:
    actions = np.zeros((200, 14), np.float32)
    actions[:, [6, 13]] = 1.0
    return actions


def test_the_bottle_is_lifted_by_the_actions_that_lift_it_and_by_no_others() -> None:
    world, late = ProbeWorld(), success_actions()
    late[:100] = still()[:100]
    assert [played(world, actions)[1] for actions in (success_actions(), still(), late)] == [True, False, False]


def test_a_simulator_ignores_the_seed_and_a_world_model_tells_no_success() -> None:
    simulator, model = ProbeWorld(), ProbeWorld("world_model")
    frames = [played(world, still(), seed=seed)[0] for world in (simulator, model) for seed in (1, 2)]
    assert (frames[0] == frames[1]).all()
    assert (frames[2] != frames[3]).any()
    assert played(model, success_actions())[1] is None
