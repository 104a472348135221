"""Whether a command may write in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from worldserve.files import LOCK, claim

__all__ = ["claim", "claim_out", "is_empty"]


def is_empty(directory: Path) -> bool:
    """Whether `directory` is not there or holds nothing but locks and what a killed `write_json` left."""
    if not directory.exists():
        return True
    if not directory.is_dir():
        raise NotADirectoryError(f"out: expected a directory; {directory} is a file. Choose another --out.")
    return all(
        path.name == LOCK or (path.name.startswith(".") and path.name.endswith(".tmp")) for path in directory.iterdir()
    )


def claim_out(directory: Path) -> BinaryIO:
    """`claim` of a command's --out."""
    return claim(directory, f"out: another process writes in {directory}; wait for it, or choose another --out")
