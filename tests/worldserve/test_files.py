"""Hashes, and files and directories that are replaced whole: killed at any instant, one whole version can be found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worldserve import files
from worldserve.files import (
    claim,
    file_sha256,
    replace_directory,
    replace_text,
    siblings,
    temporary_sibling,
    whole_sibling,
)


def write(directory: Path, version: int) -> Path:
    directory.mkdir()
    (directory / "version").write_text(str(version))
    return directory


def version(directory: Path) -> float | None:
    path = directory / "version"
    return float(path.read_text()) if path.exists() else None


def test_a_hash_is_of_the_bytes_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    # The example of FIPS 180-2, appendix B.1.
    assert file_sha256(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_reader_sees_the_old_text_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "made" / "notes.txt"
    replace_text(path, "old\n")

    def killed(source: object, target: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            replace_text(path, "new\n")
    assert path.read_text() == "old\n"
    replace_text(path, "new\n")
    assert path.read_text() == "new\n"
    assert [child.name for child in path.parent.iterdir()] == ["notes.txt"]


def test_a_directory_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for number in (1, 2):
        source = write(temporary_sibling(target), number)
        (source / f"only_in_{number}").touch()
        replace_directory(source, target)
        assert version(target) == number
    assert sorted(path.name for path in target.iterdir()) == ["only_in_2", "version"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_kill_between_the_renames_leaves_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write(tmp_path / "model", 1)
    source = write(temporary_sibling(target), 2)
    replace = os.replace

    def killed(source: Path, target: Path) -> None:
        if version(source) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            replace_directory(source, target)
    assert not target.exists()
    assert {version(path) for path in siblings(target)} == {1, 2}
    found = whole_sibling(target, version)
    assert found is not None
    assert version(found) == 2
    replace_directory(found, target)
    assert version(target) == 2
    assert not list(siblings(target))


def test_the_newest_whole_sibling_is_found(tmp_path: Path) -> None:
    target = tmp_path / "model[1]"  # no pattern
    assert whole_sibling(target, version) is None
    write(tmp_path / ".model[1].7.old", 1)
    write(tmp_path / ".model[1].8.tmp", 2)
    (tmp_path / ".model[1].9.tmp").mkdir()  # killed while it was written
    write(tmp_path / ".model1.8.tmp", 3)  # another's
    write(tmp_path / ".model[1].8.bak", 4)
    assert sorted(path.name for path in siblings(target)) == [".model[1].7.old", ".model[1].8.tmp", ".model[1].9.tmp"]
    assert whole_sibling(target, version) == tmp_path / ".model[1].8.tmp"


def test_a_directory_is_claimed_by_one_process_and_free_when_that_is_gone(tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path; from worldserve.files import claim; claim(Path({str(tmp_path / 'out')!r}), 'taken')"
    )
    with claim(tmp_path / "out", "mine"):
        refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert refused.returncode == 1
        assert refused.stderr.endswith("RuntimeError: taken\n")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
