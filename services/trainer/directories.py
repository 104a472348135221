"""Whether a command may write in a directory."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO


def is_empty(directory: Path) -> bool:
    """Whether nothing lies in `directory`, or it is not there; what a killed `write_json` left does not count."""
    if not directory.exists():
        return True
    if not directory.is_dir():
        raise NotADirectoryError(f"out: expected a directory; {directory} is a file. Choose another --out.")
    return all(path.name.startswith(".") and path.name.endswith(".tmp") for path in directory.iterdir())


def claim(directory: Path, refusal: str) -> BinaryIO:
    """An open file whose lock on `directory` ends when it is closed, or with the process however that ends.

    Raises:
        RuntimeError: `refusal`, where another process holds the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = open(directory / ".lock", "ab")  # noqa: SIM115 -- held until close
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise RuntimeError(refusal) from error
    return lock
