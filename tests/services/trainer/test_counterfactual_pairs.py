"""Pairs from one start: the smallest failing size, both members judged, recorded as training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.trainer.counterfactual_pairs import (
    PairFinder,
    PairSettings,
    pair_candidates,
    record_pairs,
    shuffled,
    summarise_pairs,
)
from tests.services.trainer.fork_world import ForkWorld, episode
from worldserve.contract import adjust_bottle
from worldserve.episodes import Episode, EpisodeReader, EpisodeWriter

CONTRACT = adjust_bottle("simulator", "fork-world", {})
SIZES = {"mm": (2.0, 6.0, 12.0), "actions": (3.0, 10.0, 24.0)}


def finder(reference: ForkWorld, target: ForkWorld, kind: str = "offset", batch: int = 8) -> PairFinder:
    return PairFinder(reference, target, CONTRACT, PairSettings((kind,), SIZES, 0), batch)  # type: ignore[arg-type]


def find(reference: ForkWorld, target: ForkWorld, episodes: list[Episode], **changes: Any) -> list[dict[str, Any]]:
    return finder(reference, target, **changes).rows(episodes)


# A perturbation of 2 mm stays within the simulator's 4 mm, one of 6 mm does not (it may point upwards a little).
TARGETS = [(4.0, "both_right"), (100.0, "both_success"), (0.0, "both_failure")]


@pytest.mark.parametrize(("limit_mm", "reading"), TARGETS)
def test_the_smallest_size_that_fails_is_kept_and_read_in_the_target(limit_mm: float, reading: str) -> None:
    reference, target = ForkWorld(4.0), ForkWorld(limit_mm, verdicts=True)
    [row] = find(reference, target, [episode(3)])
    assert row["found"]
    assert (row["kind"], row["unit"], row["size"]) == ("offset", "mm", 6.0)
    assert row["tried"] == [{"size": 2.0, "success": True}, {"size": 6.0, "success": False}]
    assert summarise_pairs([row], 0.9, 0)[reading]["value"] == 1
    assert reference.frames_drawn == target.frames_drawn == 0
    assert reference.open_episodes == target.open_episodes == set()


def test_a_gripper_that_closes_too_early_or_too_late_fails() -> None:
    [row] = find(ForkWorld(4.0), ForkWorld(4.0, verdicts=True), [episode(3)], kind="gripper")
    assert row["found"]
    assert (row["unit"], row["size"] > 3) == ("actions", True)


def test_candidates_without_a_pair_say_why_and_the_target_is_not_asked() -> None:
    target = ForkWorld(4.0, verdicts=True)
    sturdy, failing, idle = episode(0), episode(1, error_mm=50.0), episode(2)
    idle.executed_actions[:, 13] = 1.0
    rows = find(ForkWorld(40.0), target, [sturdy, failing, idle])
    assert [row["found"] for row in rows] == [False, False, False]
    assert [row["reason"] for row in rows] == [
        "no size failed",
        "recorded as a success, failed when replayed",
        "no grasp",
    ]
    assert target.runs == 0
    summary = summarise_pairs(rows, 0.9, 0)
    assert (summary["count"], summary["candidates"], summary["both_right"]) == (0, 3, None)
    assert summary["not_found"]["no size failed"] == 1


def test_rows_do_not_depend_on_the_batch() -> None:
    episodes = [episode(number, error_mm=number / 4) for number in range(6)]
    alone = find(ForkWorld(4.0), ForkWorld(4.0, verdicts=True), episodes, batch=1)
    assert alone == find(ForkWorld(4.0), ForkWorld(4.0, verdicts=True), episodes, batch=64)


def row(state: str, nominal: bool, counterfactual: bool, size: float = 4.0) -> dict[str, Any]:
    readings = {"nominal": {"success": nominal}, "counterfactual": {"success": counterfactual}}
    facts = {"initial_state_id": state, "found": True, "reason": "", "kind": "offset", "unit": "mm", "size": size}
    return facts | {"target": readings}


def test_shares_are_of_all_pairs_and_by_size() -> None:
    rows = [row("a", True, False), row("a", True, True), row("b", False, False, 8.0), row("c", False, True, 8.0)]
    summary = summarise_pairs(rows, 0.9, 0)
    values = {name: summary[name]["value"] for name in ("both_right", "both_success", "both_failure", "swapped")}
    assert values == {"both_right": 0.25, "both_success": 0.25, "both_failure": 0.25, "swapped": 0.25}
    assert summary["both_right"]["count"] == 3  # states
    assert summary["by_size"]["offset 4 mm"]["both_right"]["value"] == 0.5
    assert summary["by_size"]["offset 8 mm"]["count"] == 2


def test_candidates_take_every_state_once_before_any_twice_and_in_an_order_that_stays() -> None:
    rows = [{"episode_id": f"{s}{n}", "initial_state_id": s} for s in "abcd" for n in range(3)]
    names = pair_candidates(rows, 0)
    assert len(names) == 12
    assert {name[0] for name in names[:4]} == {name[0] for name in names[4:8]} == set("abcd")
    assert names == pair_candidates(rows[::-1], 0) != pair_candidates(rows, 1)
    assert [r["episode_id"] for r in shuffled(rows, 0)] == [r["episode_id"] for r in shuffled(rows[::-1], 0)]


def recorded(tmp_path: Path) -> tuple[PairFinder, list[dict[str, Any]], EpisodeReader]:
    with EpisodeWriter(tmp_path / "data") as writer:
        writer.append(episode(3))
    reader = EpisodeReader(tmp_path / "data")
    made = finder(ForkWorld(4.0), ForkWorld(4.0, verdicts=True))
    return made, made.rows([reader[0]]), reader


def test_both_members_are_recorded_with_all_frames_once(tmp_path: Path) -> None:
    made, rows, reader = recorded(tmp_path)
    assert record_pairs(made, rows, reader, CONTRACT, tmp_path / "pairs") == 2
    assert record_pairs(made, rows, reader, CONTRACT, tmp_path / "pairs") == 0
    nominal, counterfactual = EpisodeReader(tmp_path / "pairs")
    assert (nominal.success, counterfactual.success) == (True, False)
    assert nominal.initial_state_id == counterfactual.initial_state_id == "adjust_bottle/validation/0003"
    assert nominal.frames.shape == counterfactual.frames.shape == (201, 16, 16, 3)
    assert counterfactual.metadata["pair"] == nominal.metadata["pair"] == "rollouts/0/3"
    assert counterfactual.metadata["size"] == 6.0
    assert nominal.policy_sha256
    assert not counterfactual.policy_sha256
    assert not (nominal.executed_actions == counterfactual.executed_actions).all()


def test_a_record_of_other_sizes_is_refused(tmp_path: Path) -> None:
    made, rows, reader = recorded(tmp_path)
    record_pairs(made, rows, reader, CONTRACT, tmp_path / "pairs")
    with pytest.raises(ValueError, match="perturbed otherwise"):
        record_pairs(made, [{**rows[0], "size": 12.0}], reader, CONTRACT, tmp_path / "pairs")


def test_a_record_of_another_seed_is_refused(tmp_path: Path) -> None:
    made, rows, reader = recorded(tmp_path)
    record_pairs(made, rows, reader, CONTRACT, tmp_path / "pairs")
    settings = PairSettings(("offset",), SIZES, 1)
    other = PairFinder(ForkWorld(4.0), ForkWorld(4.0, verdicts=True), CONTRACT, settings, 8)
    with pytest.raises(ValueError, match=r"perturbed otherwise \(expected .*'perturbation_seed': 1"):
        record_pairs(other, rows, reader, CONTRACT, tmp_path / "pairs")


def test_a_simulator_that_no_longer_agrees_is_an_error(tmp_path: Path) -> None:
    _, rows, reader = recorded(tmp_path)
    other = finder(ForkWorld(100.0), ForkWorld(4.0, verdicts=True))
    with pytest.raises(RuntimeError, match="expected the counterfactual of 'rollouts/0/3' to end as it did before"):
        record_pairs(other, rows, reader, CONTRACT, tmp_path / "other")
