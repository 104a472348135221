"""What one probe found: a verdict, the evidence for it, and the likely cause."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


class Verdict(enum.Enum):
    """What a probe says."""

    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Finding:
    """One probe's answer.

    Attributes:
        probe: its name.
        question: what it asks, in words.
        verdict: what it says.
        evidence: one sentence with the figures.
        cause: where it failed, the likely cause and what to do; where it is not applicable, why; else "".
        numbers: the figures by name.
        strip: pictures by caption, uint8 (height, width, 3).
    """

    probe: str
    question: str
    verdict: Verdict
    evidence: str
    cause: str = ""
    numbers: dict[str, float | int | str | bool | None] = field(default_factory=dict)
    strip: tuple[tuple[str, NDArray[np.uint8]], ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it found a fault."""
        return self.verdict is Verdict.FAIL


def not_applicable(probe: str, question: str, why: str) -> Finding:
    """A probe that cannot be asked here, and why."""
    return Finding(probe, question, Verdict.NOT_APPLICABLE, "nothing to measure", why)


def found(fault: bool) -> Verdict:
    """FAIL for a fault."""
    return Verdict.FAIL if fault else Verdict.PASS
