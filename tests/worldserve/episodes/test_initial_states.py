"""Sealed sets: round trip, tampering, and the refusal to train on test states."""

import json
from pathlib import Path

import numpy as np
import pytest

from worldserve.episodes import (
    InitialState,
    InitialStateSet,
    SealedStateError,
    all_initial_states,
    refuse_for_training,
)
from worldserve.episodes.initial_states import shifted_id, split_shifted_id


def make_state(number: int, purpose: str = "validation") -> InitialState:
    random = np.random.default_rng(number)
    return InitialState(
        initial_state_id=f"adjust_bottle/{purpose}/{number:04d}",
        purpose=purpose,
        scene={"tag": number % 2, "bottle_model": 13, "x_m": float(random.normal()), "y_m": -0.1, "yaw_rad": 0.1},
        frame=random.integers(0, 256, (12, 16, 3), dtype=np.uint8),
        proprioception=np.array([0, 0.1, -0.0, 1e-45] + [1] * 10, dtype=np.float32),
        instruction="Pick up the bottle with the left arm.",
    )


def make_set(count: int = 5, purpose: str = "validation") -> InitialStateSet:
    return InitialStateSet(tuple(make_state(number, purpose) for number in range(count)), {"first_seed": 7})


def test_a_saved_set_loads_equal(tmp_path) -> None:
    written = make_set()
    written.save(tmp_path / "validation")
    read = InitialStateSet.load(tmp_path / "validation")
    assert read.sha256 == written.sha256
    assert read.ids == written.ids
    assert read.purpose == "validation"
    assert read.made_by == {"first_seed": 7}
    for got, expected in zip(read, written, strict=True):
        np.testing.assert_array_equal(got.frame, expected.frame)
        assert got.proprioception.tobytes() == expected.proprioception.tobytes()
        assert got.scene == expected.scene
        assert got.instruction == expected.instruction
    assert read.by_id("adjust_bottle/validation/0003").sha256 == written[3].sha256
    assert "adjust_bottle/validation/0003" in read
    assert "adjust_bottle/validation/0009" not in read


def test_an_unknown_id_is_answered_with_those_there_are() -> None:
    with pytest.raises(
        KeyError, match=r"adjust_bottle/validation/0000 \.\. adjust_bottle/validation/0004 \(5 states\)"
    ):
        make_set().by_id("adjust_bottle/validation/0009")


@pytest.mark.parametrize(
    ("name", "value"),
    [("instruction", "Use the right arm."), ("scene", {"tag": 1}), ("proprioception", [0.5] * 14)],
)
def test_a_changed_line_is_found(tmp_path, name, value) -> None:
    make_set().save(tmp_path / "set")
    path = tmp_path / "set/states.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2][name] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="adjust_bottle/validation/0002 is not what was sealed"):
        InitialStateSet.load(tmp_path / "set")


def test_a_changed_pixel_is_found(tmp_path) -> None:
    make_set().save(tmp_path / "set")
    with np.load(tmp_path / "set/frames.npz") as archive:
        frames = archive["frames"]
    frames[4, 3, 3, 1] ^= 1
    np.savez_compressed(tmp_path / "set/frames.npz", frames=frames)
    with pytest.raises(ValueError, match="adjust_bottle/validation/0004 is not what was sealed"):
        InitialStateSet.load(tmp_path / "set")


def test_a_state_left_out_is_found(tmp_path) -> None:
    make_set(5).save(tmp_path / "set")
    make_set(4).save(tmp_path / "short")
    facts = json.loads((tmp_path / "set/set.json").read_text())
    (tmp_path / "short/set.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="expected 5 states"):
        InitialStateSet.load(tmp_path / "short")
    (tmp_path / "short/set.json").write_text(json.dumps({**facts, "count": 4}))
    with pytest.raises(ValueError, match="the set's SHA-256 differs"):
        InitialStateSet.load(tmp_path / "short")


def test_a_sealed_set_is_replaced_only_when_asked(tmp_path) -> None:
    make_set(2).save(tmp_path / "set")
    with pytest.raises(FileExistsError, match="sealed there already"):
        make_set(3).save(tmp_path / "set")
    make_set(3).save(tmp_path / "set", replace=True)
    assert len(InitialStateSet.load(tmp_path / "set")) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ((), "expected at least one"),
        ((make_state(0), make_state(0)), "each initial_state_id once"),
        ((make_state(0), make_state(1, "test")), "one task, purpose and frame size"),
    ],
)
def test_a_set_that_makes_no_sense_is_refused(states, message) -> None:
    with pytest.raises(ValueError, match=message):
        InitialStateSet(states)


def test_all_states_of_a_directory_by_id(tmp_path) -> None:
    make_set(2, "train").save(tmp_path / "train")
    make_set(3, "test").save(tmp_path / "test")
    states = all_initial_states(tmp_path)
    assert len(states) == 5
    assert states["adjust_bottle/test/0002"].purpose == "test"
    with pytest.raises(FileNotFoundError, match="seal-initial-states"):
        all_initial_states(tmp_path / "nowhere")


def test_a_missing_set_names_the_command_that_makes_it(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="worldserve seal-initial-states"):
        InitialStateSet.load(tmp_path)


def refusal(ids: list[str]) -> SealedStateError | None:
    """Why training on these states is refused; None where it is not."""
    try:
        refuse_for_training(ids)
    except SealedStateError as error:
        return error
    return None


def test_training_may_use_train_and_validation_states() -> None:
    assert refusal([]) is None
    assert refusal(["adjust_bottle/train/0000", "adjust_bottle/validation/0143"]) is None
    assert refusal(["adjust_bottle/train/0000", "adjust_bottle/test/0143"]) is not None


@pytest.mark.parametrize("bad", ["adjust_bottle/test/0000", "adjust_bottle/exam/0000", "0000", "", "a/train/1/2"])
def test_training_refuses_test_states_and_ids_that_name_no_purpose(bad: str) -> None:
    with pytest.raises(SealedStateError, match="got 1 that are sealed for testing or name no purpose") as error:
        refuse_for_training(["adjust_bottle/train/0000", bad])
    assert repr(bad) in str(error.value)


def test_the_message_stays_short_for_many_ids() -> None:
    with pytest.raises(SealedStateError, match=r"got 144 .*, \.\.\.\)"):
        refuse_for_training(f"adjust_bottle/test/{number:04d}" for number in range(144))


def test_the_shipped_sets_are_intact() -> None:
    root = Path(__file__).parents[3] / "initial_states"
    states = all_initial_states(root)
    assert sum(state.purpose == "test" for state in states.values()) == 144
    frame = states["adjust_bottle/test/0000"].frame
    assert frame.shape == (96, 128, 3)
    assert not frame.flags.writeable


@pytest.mark.parametrize(("dx_um", "dy_um"), [(0, 0), (3260, 0), (0, -4800), (50_000, -50_000)])
def test_a_shifted_id_names_its_state_and_its_shift(dx_um: int, dy_um: int) -> None:
    name = shifted_id("adjust_bottle/validation/0007", dx_um, dy_um)
    assert name == f"adjust_bottle/validation/0007:shift_um:{dx_um}:{dy_um}"
    assert split_shifted_id(name) == ("adjust_bottle/validation/0007", dx_um, dy_um)


def test_an_id_without_a_shift_is_its_own_state() -> None:
    assert split_shifted_id("adjust_bottle/train/0000") == ("adjust_bottle/train/0000", 0, 0)


@pytest.mark.parametrize(
    "bad",
    ["a/train/0:", "a/train/0:shift_um:1", "a/train/0:shift_um:+1:0", "a/train/0:shift_um:-0:0", ":shift_um:1:1",
     "a/train/0:shift_um:01:0", "a/train/0:shift_um:50001:0", "a/train/0:shift_um:1:0:shift_um:1:0"],
)  # fmt: skip
def test_a_malformed_shift_is_refused_with_an_example(bad: str) -> None:
    with pytest.raises(ValueError, match="such as 'adjust_bottle/validation/0007:shift_um:3260:0'"):
        split_shifted_id(bad)


def test_a_shifted_state_has_its_states_purpose_so_a_shifted_test_state_stays_sealed() -> None:
    assert refusal([shifted_id("adjust_bottle/validation/0007", 3, 0)]) is None
    assert refusal([shifted_id("adjust_bottle/test/0007", 3, 0)]) is not None
