"""Whether a command may write in a directory, and what a directory of results was made with."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from services.trainer.json_files import read_json, write_json
from worldserve.files import LOCK, claim
from worldserve.settings import refuse_changed_settings

__all__ = ["Results", "claim", "claim_out", "is_empty"]


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


@dataclass(frozen=True)
class Results:
    """One command's results as a directory: known by a file of the settings that they depend on.

    A directory of other things is never written to, nor one of other settings, nor one that another process works in.
    """

    what: str
    """In messages: "an evaluation"."""
    settings_file: str
    """Name of the JSON file of settings, which is how the directory is known."""
    written: tuple[str, ...] | None = None
    """Files and directories beside it that `fresh` throws away, and nothing else; None: all that is there."""
    free: frozenset[str] = frozenset()
    """Settings on which the results do not depend."""
    can_be_fresh: bool = True
    """Whether the command has --fresh, which refusals then advise."""

    def claim(self, directory: Path, settings: Mapping[str, Any], fresh: bool = False) -> BinaryIO:
        """The lock on `directory`, held until it is closed, once `settings` are noted there.

        Raises:
            NotADirectoryError, ValueError: for a file, for other things, and for results of other settings; nothing is
                changed then, and no lock left in a directory of other things.
            RuntimeError: while another process writes there.
        """
        self.refuse_other_things(directory)
        lock = claim_out(directory)
        try:
            self.note(directory, settings, fresh)
        except BaseException:
            lock.close()
            raise
        return lock

    def note(self, directory: Path, settings: Mapping[str, Any], fresh: bool = False) -> None:
        """`claim` without its lock, for who holds it."""
        self.refuse_other_things(directory)
        path = directory / self.settings_file
        if path.exists() and not fresh:
            refuse_changed_settings(
                read_json(path),
                settings,
                what=f"out: {directory} holds {self.what} with other settings",
                advice=f"Choose another --out{', or --fresh to throw it away' if self.can_be_fresh else ''}.",
                free=self.free,
            )
            return
        if fresh:
            self._throw_away(directory)
        write_json(path, settings)

    def refuse_other_things(self, directory: Path) -> None:
        """Raises ValueError for a directory that is neither empty nor of such results."""
        if not (directory / self.settings_file).exists() and not is_empty(directory):
            raise ValueError(
                f"out: expected a new directory or that of {self.what}; {directory} holds other things. Choose another "
                "--out."
            )

    def _throw_away(self, directory: Path) -> None:
        if not directory.exists():
            return
        names = [path.name for path in directory.iterdir()] if self.written is None else self.written
        for path in (directory / name for name in names if name != LOCK):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
