"""Whether a command may write in a directory."""

from __future__ import annotations

from pathlib import Path


def is_empty(directory: Path) -> bool:
    """Whether nothing lies in `directory`, or it is not there; what a killed `write_json` left does not count."""
    if not directory.exists():
        return True
    if not directory.is_dir():
        raise NotADirectoryError(f"out: expected a directory; {directory} is a file. Choose another --out.")
    return all(path.name.startswith(".") and path.name.endswith(".tmp") for path in directory.iterdir())
