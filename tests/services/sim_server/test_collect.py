"""`worldserve demonstrate`: every frame of every episode, the same bytes whatever the workers, and going on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.sim_server.collect import CollectConfig, run
from worldserve.contract import execute
from worldserve.episodes import EpisodeReader, InitialStateSet

STATES = Path(__file__).parents[3] / "initial_states" / "train"


def test_an_interrupted_collection_goes_on_and_is_the_same_as_one_in_a_piece(tmp_path: Path) -> None:
    settings = {"noise_scale": 1.6, "initial_states": STATES, "seed": 5, "first_state": 2}
    assert run(CollectConfig(tmp_path / "parts", episodes=1, workers=1, **settings)) == 1  # type: ignore[arg-type]
    assert run(CollectConfig(tmp_path / "parts", episodes=2, workers=2, **settings)) == 1  # type: ignore[arg-type]
    assert run(CollectConfig(tmp_path / "parts", episodes=2, workers=2, **settings)) == 0  # type: ignore[arg-type]
    assert run(CollectConfig(tmp_path / "whole", episodes=2, workers=1, **settings)) == 2  # type: ignore[arg-type]
    parts, whole = EpisodeReader(tmp_path / "parts"), EpisodeReader(tmp_path / "whole")
    assert {info.episode_id for info in parts.infos} == {f"expert/1.6/5/{index}" for index in range(2)}
    states, order = InitialStateSet.load(STATES), {info.episode_id: n for n, info in enumerate(parts.infos)}
    for position, info in enumerate(whole.infos):
        one, other = whole[position], parts[order[info.episode_id]]
        assert one.initial_state_id == states[2 + position].initial_state_id == other.initial_state_id
        np.testing.assert_array_equal(one.executed_actions, other.executed_actions)
        np.testing.assert_array_equal(one.frames, other.frames)
        assert one.frames.shape == (201, 96, 128, 3)
        np.testing.assert_array_equal(one.frames[0], states[2 + position].frame)
        again = execute(one.requested_actions, one.proprioception[0], one.contract.interface.action)
        np.testing.assert_array_equal(again.actions, one.executed_actions)
        assert one.rewards.sum() == float(bool(one.success))


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"episodes": 0}, "episodes"), ({"workers": 0}, "workers"), ({"noise_scale": float("nan")}, "noise_scale")],
)
def test_settings_that_make_no_sense_are_named(changed: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CollectConfig(Path("x"), **changed)  # type: ignore[arg-type]
