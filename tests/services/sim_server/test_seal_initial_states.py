"""Sealing draws the same states from the same seeds, and the shipped sets are those of today's simulator."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sapien", reason="the simulator needs SAPIEN")

from services.sim_server.seal_initial_states import FIRST_SEEDS, SealConfig, main, seal
from services.sim_server.tabletop import SceneParameters, TabletopScene
from worldserve.episodes import InitialStateSet

SHIPPED = Path(__file__).parents[3] / "initial_states"
SIZES = {"train": 1024, "validation": 144, "test": 144}


def small(out: Path, **changes: object) -> SealConfig:
    return SealConfig(out=out, train=3, validation=2, test=2, **changes)


def test_the_same_seeds_give_the_same_states(tmp_path: Path) -> None:
    first, second = seal(small(tmp_path / "a")), seal(small(tmp_path / "b"))
    assert {name: states.sha256 for name, states in first.items()} == {
        name: states.sha256 for name, states in second.items()
    }
    assert InitialStateSet.load(tmp_path / "a" / "train").ids == tuple(f"adjust_bottle/train/000{n}" for n in range(3))


def test_a_sealed_set_is_not_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seal(small(tmp_path, purposes=("test",)))
    assert main(["--out", str(tmp_path), "--purposes", "test", "--test", "1"]) == 1
    assert "--replace" in capsys.readouterr().err
    assert len(InitialStateSet.load(tmp_path / "test")) == 2


def test_an_unknown_purpose_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--purposes", "exam"]) == 1
    assert "exam" in capsys.readouterr().err


@pytest.mark.parametrize("purpose", list(SIZES))
def test_shipped_scenes_follow_from_their_seeds(purpose: str) -> None:
    states = InitialStateSet.load(SHIPPED / purpose)
    assert len(states) == SIZES[purpose]
    for number, state in enumerate(states):
        parameters = SceneParameters.from_seed(FIRST_SEEDS[purpose] + number)
        assert SceneParameters.from_dict(state.scene) == parameters
        assert state.instruction == parameters.instruction
    sides = [state.scene["tag"] for state in states]
    assert 0.4 < sum(sides) / len(sides) < 0.6


def test_no_shipped_scene_is_in_two_sets() -> None:
    scenes = [tuple(state.scene.items()) for purpose in SIZES for state in InitialStateSet.load(SHIPPED / purpose)]
    assert len(set(scenes)) == len(scenes) == sum(SIZES.values())


@pytest.mark.parametrize("number", [0, 77])
def test_a_shipped_first_frame_is_what_the_simulator_draws(number: int) -> None:
    state = InitialStateSet.load(SHIPPED / "validation")[number]
    with TabletopScene(SceneParameters.from_dict(state.scene)) as scene:
        frame = scene.observe()
        np.testing.assert_array_equal(scene.proprioception(), state.proprioception)
    # Pixels are promised per version of SAPIEN and Mesa; a moved camera or another colour changes far more than this.
    different = np.abs(frame.astype(int) - state.frame.astype(int)).max(axis=2) > 8
    assert different.mean() < 0.01
