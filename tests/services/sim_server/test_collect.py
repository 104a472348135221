"""`worldserve demonstrate`: every frame of every episode, the same bytes whatever the workers, and going on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.sim_server.collect import DemonstrateConfig, main, run
from worldserve.contract import execute
from worldserve.episodes import Episode, EpisodeReader, EpisodeWriter, InitialStateSet

STATES = Path(__file__).parents[3] / "initial_states" / "train"


def record(directory: Path, *indices: int, seed: int = 0, first_state: int = 0) -> None:
    """A shard of a killed run: finished episodes without pixels."""
    zeros = np.zeros((50, 14), np.float32)
    with EpisodeWriter(directory) as writer:
        for index in indices:
            writer.append(
                Episode(
                    episode_id=f"expert/0/{seed}/{index}",
                    initial_state_id=f"adjust_bottle/train/{first_state + index:04d}",
                    seed=seed,
                    instruction="lift the bottle",
                    requested_actions=zeros,
                    executed_actions=zeros,
                    proprioception=np.zeros((51, 14), np.float32),
                    rewards=np.zeros(50, np.float32),
                    success=True,
                )
            )


def order(directory: Path) -> list[int]:
    """Indices of the episodes of a data set."""
    return [int(info.episode_id.rpartition("/")[2]) for info in EpisodeReader(directory).infos]


def hidden(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


def test_an_interrupted_collection_goes_on_and_is_the_same_as_one_in_a_piece(tmp_path: Path) -> None:
    settings = {"noise_scale": 1.6, "initial_states": STATES, "seed": 5, "first_state": 2}
    assert run(DemonstrateConfig(tmp_path / "parts", episodes=1, workers=1, **settings)) == 1  # type: ignore[arg-type]
    assert run(DemonstrateConfig(tmp_path / "parts", episodes=2, workers=2, **settings)) == 1  # type: ignore[arg-type]
    assert run(DemonstrateConfig(tmp_path / "parts", episodes=2, workers=2, **settings)) == 0  # type: ignore[arg-type]
    assert run(DemonstrateConfig(tmp_path / "whole", episodes=2, workers=1, **settings)) == 2  # type: ignore[arg-type]
    parts, whole = EpisodeReader(tmp_path / "parts"), EpisodeReader(tmp_path / "whole")
    assert order(tmp_path / "parts") == order(tmp_path / "whole") == [0, 1]
    states = InitialStateSet.load(STATES)
    for position, (one, other) in enumerate(zip(whole, parts, strict=True)):
        assert one.episode_id == other.episode_id == f"expert/1.6/5/{position}"
        assert one.initial_state_id == states[2 + position].initial_state_id == other.initial_state_id
        np.testing.assert_array_equal(one.executed_actions, other.executed_actions)
        np.testing.assert_array_equal(one.frames, other.frames)
        assert one.frames.shape == (201, 96, 128, 3)
        np.testing.assert_array_equal(one.frames[0], states[2 + position].frame)
        again = execute(one.requested_actions, one.proprioception[0], one.contract.interface.action)
        np.testing.assert_array_equal(again.actions, one.executed_actions)
        assert one.rewards.sum() == float(bool(one.success))


@pytest.mark.parametrize(
    ("out", "shards"),
    [
        ((), [(0, 2, 4), (1, 3, 5)]),  # two workers, stopped before the merge
        ((0, 1), [(0, 2, 4), (1, 3, 5)]),  # stopped in mid-merge
        ((0, 1, 2, 3, 4, 5), [(0, 2, 4), (1, 3, 5)]),  # stopped before the shards were removed
        ((0,), [(3,), (2, 5), (1,), (4,)]),  # four workers, resumed with three
        ((), [(0, 2, 4), (1, 3, 5), (0, 3), (1, 4)]),  # what a resumption with another number of workers once left
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_shards_of_any_number_of_workers_are_merged_in_the_order_of_indices(
    tmp_path: Path, out: tuple[int, ...], shards: list[tuple[int, ...]], workers: int
) -> None:
    if out:
        record(tmp_path / "demos", *out)
    for worker, indices in enumerate(shards):
        record(tmp_path / f".demos.worker-{worker}", *indices)
    config = DemonstrateConfig(tmp_path / "demos", episodes=6, workers=workers, initial_states=STATES)
    assert run(config) == 6 - len(out)
    assert order(tmp_path / "demos") == list(range(6))
    assert hidden(tmp_path) == []
    assert run(config) == 0


def test_episodes_that_a_run_does_not_ask_for_wait_in_their_shard(tmp_path: Path) -> None:
    record(tmp_path / ".demos.worker-0", 0, 2, 4)
    record(tmp_path / ".demos.worker-1", 1, 3)
    record(tmp_path / ".demos.worker-2", 0, seed=9)
    assert run(DemonstrateConfig(tmp_path / "demos", episodes=3, workers=1, initial_states=STATES)) == 3
    assert order(tmp_path / "demos") == [0, 1, 2]
    assert hidden(tmp_path) == [".demos.worker-0", ".demos.worker-1", ".demos.worker-2"]
    assert run(DemonstrateConfig(tmp_path / "demos", episodes=5, workers=1, initial_states=STATES)) == 2
    assert order(tmp_path / "demos") == [0, 1, 2, 3, 4]
    assert hidden(tmp_path) == [".demos.worker-2"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"episodes": 0}, "episodes"), ({"workers": 0}, "workers"), ({"noise_scale": float("nan")}, "noise_scale")],
)
def test_settings_that_make_no_sense_are_named(changed: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DemonstrateConfig(Path("x"), **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--noise-scale", "1.6"], "expected episode expert/0/0/0; got expert/1.6/0/0"),
        (["--seed", "4"], "expected episode expert/0/0/0; got expert/0/4/0"),
        (
            ["--first-state", "3"],
            "expected expert/0/0/0 from adjust_bottle/train/0000; got from adjust_bottle/train/0003",
        ),
        (["--initial-states", str(STATES.parent / "validation")], "got from adjust_bottle/validation/0000"),
    ],
)
def test_a_data_set_is_not_gone_on_with_by_another_plan(
    tmp_path: Path, changed: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "demos", 0, 1)
    arguments = ["--out", str(tmp_path / "demos"), "--episodes", "2", "--initial-states", str(STATES)]
    assert main(arguments) == 0
    assert "0 episodes added, 2 in all" in capsys.readouterr().out
    assert main([*arguments, *changed]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "another --out" in error
    assert order(tmp_path / "demos") == [0, 1]
    assert hidden(tmp_path) == []


def test_a_shard_from_other_initial_states_is_not_merged(tmp_path: Path) -> None:
    record(tmp_path / ".demos.worker-0", 0, 1, first_state=5)
    with pytest.raises(ValueError, match=r"\.demos\.worker-0 holds demonstrations of another plan"):
        run(DemonstrateConfig(tmp_path / "demos", episodes=2, initial_states=STATES))
    assert not (tmp_path / "demos").exists()


def test_initial_states_that_are_not_there_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "demos"), "--initial-states", str(STATES.parent)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"worldserve demonstrate: {STATES.parent}: no sealed set of initial states")
    assert hidden(tmp_path) == []
