"""Instruction tokens without a vocabulary file: words hashed to rows of a small table."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

PADDING = 0
_WORD = re.compile(r"[a-z0-9]+")


@lru_cache(maxsize=4096)
def _row(word: str, vocabulary: int) -> int:
    # SHA-256, not hash(): the same row in every process and version.
    return 1 + int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") % (vocabulary - 1)


def tokenize(instructions: Sequence[str], length: int, vocabulary: int) -> Tensor:
    """Lower-cased words to int64 (B, length), cut or padded with 0 at the end.

    Every instruction takes the same length, whatever its companions, so a sample's arithmetic does not depend on them.
    """
    tokens = torch.full((len(instructions), length), PADDING, dtype=torch.int64)
    for row, instruction in enumerate(instructions):
        words = _WORD.findall(instruction.lower())[:length]
        tokens[row, : len(words)] = torch.tensor([_row(word, vocabulary) for word in words], dtype=torch.int64)
    return tokens
