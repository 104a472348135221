"""Directories that are replaced whole: two renames, and what to read when a kill fell between them."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


def temporary_sibling(target: Path, suffix: str = "tmp") -> Path:
    """Where this process prepares `target`, or sets the one before it aside: `.NAME.PID.SUFFIX` beside it."""
    return target.with_name(f".{target.name}.{os.getpid()}.{suffix}")


def replace_directory(source: Path, target: Path) -> None:
    """Move `source` over `target`; a directory cannot be replaced in one call, so the old one steps aside first.

    A kill in between leaves no `target`, but both its versions beside it: see `whole_sibling`.
    """
    aside = temporary_sibling(target, "old")
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        os.replace(target, aside)
    os.replace(source, target)
    shutil.rmtree(aside, ignore_errors=True)


def is_empty(directory: Path) -> bool:
    """Whether nothing lies in `directory`, or it is not there; what a killed `write_json` left does not count."""
    if not directory.exists():
        return True
    if not directory.is_dir():
        raise NotADirectoryError(f"out: expected a directory; {directory} is a file. Choose another --out.")
    return all(path.name.startswith(".") and path.name.endswith(".tmp") for path in directory.iterdir())


def siblings(target: Path) -> Iterator[Path]:
    """What interrupted writers left beside `target`, whole or not."""
    for suffix in ("tmp", "old"):
        yield from target.parent.glob(f".{glob.escape(target.name)}.*.{suffix}")


def whole_sibling(target: Path, age: Callable[[Path], float | None]) -> Path | None:
    """The newest whole directory that an interrupted writer left beside `target`, or None.

    `age` says how new a directory's content is (larger is newer), or None where it is not whole.
    """
    found = [(written, path) for path in siblings(target) if (written := age(path)) is not None]
    return max(found)[1] if found else None
