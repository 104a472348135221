"""Hashes of files, by which weights and data are named."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def file_sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, 64 lower-case hex digits; read in pieces, so the file may be larger than memory."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
