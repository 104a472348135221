"""What a command's --out may be, and what is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.directories import Results, claim_out, is_empty
from services.trainer.json_files import read_json, write_json
from worldserve.files import LOCK

RESULTS = Results("a survey", "survey.json", ("rows.jsonl", "videos"), frozenset({"batch"}))
SETTINGS = {"seed": 0, "batch": 8}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], True),
        ([LOCK], True),
        ([".survey.json.77.tmp"], True),  # of a killed write_json
        ([".profile"], False),
        (["thesis.tex"], False),
    ],
)
def test_what_is_empty(tmp_path: Path, files: list[str], expected: bool) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert is_empty(tmp_path) is expected


@pytest.mark.parametrize("fresh", [False, True])
def test_a_directory_of_other_things_is_left_alone(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "episode.parquet").write_text("hours of work")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        ValueError, match=r"new directory or that of a survey; .* holds other things. Choose another --out"
    ):
        RESULTS.claim(tmp_path, SETTINGS, fresh)
    assert sorted(tmp_path.rglob("*")) == before  # no lock either


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file is a file\. Choose another --out"):
        RESULTS.claim(tmp_path / "file", SETTINGS)


def test_settings_are_noted_and_others_refused_without_a_change(tmp_path: Path) -> None:
    RESULTS.claim(tmp_path / "new", SETTINGS).close()
    RESULTS.claim(tmp_path / "new", {**SETTINGS, "batch": 4}).close()  # no result depends on it
    with pytest.raises(
        ValueError, match=r"holds a survey with other settings:\n  seed: expected 0; got 1\nChoose .*, or --fresh"
    ):
        RESULTS.claim(tmp_path / "new", {**SETTINGS, "seed": 1})
    assert read_json(tmp_path / "new" / "survey.json") == SETTINGS
    RESULTS.claim(tmp_path / "new", SETTINGS).close()  # a refusal holds no lock


def test_a_flag_that_is_not_there_is_not_advised(tmp_path: Path) -> None:
    stubborn = Results("a survey", "survey.json", can_be_fresh=False)
    stubborn.claim(tmp_path, SETTINGS).close()
    with pytest.raises(ValueError, match=r"Choose another --out\.$"):
        stubborn.claim(tmp_path, {"seed": 1})


@pytest.mark.parametrize(
    ("written", "left"),
    [(("rows.jsonl", "videos"), [LOCK, "notes.txt", "survey.json"]), (None, [LOCK, "survey.json"])],
)
def test_fresh_throws_away_what_the_command_writes(
    tmp_path: Path, written: tuple[str, ...] | None, left: list[str]
) -> None:
    (tmp_path / "videos").mkdir()
    for name in ("rows.jsonl", "notes.txt", "videos/0.mp4"):
        (tmp_path / name).touch()
    write_json(tmp_path / "survey.json", SETTINGS)
    Results("a survey", "survey.json", written).claim(tmp_path, {"seed": 1}, fresh=True).close()
    assert names(tmp_path) == left
    assert read_json(tmp_path / "survey.json") == {"seed": 1}


@pytest.mark.parametrize("fresh", [False, True])
def test_what_another_process_works_on_stays(tmp_path: Path, fresh: bool) -> None:
    RESULTS.claim(tmp_path, SETTINGS).close()
    (tmp_path / "rows.jsonl").write_text("{}")
    with claim_out(tmp_path), pytest.raises(RuntimeError, match="another process writes in"):
        RESULTS.claim(tmp_path, {"seed": 1}, fresh)
    assert (names(tmp_path), read_json(tmp_path / "survey.json")) == ([LOCK, "rows.jsonl", "survey.json"], SETTINGS)
