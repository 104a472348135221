"""A job of the trainer as values; prose of every field: `protos/worldserve/v1/trainer.proto`. No protobuf here."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class JobState(enum.Enum):
    """Where a job stands."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True)
class JobProgress:
    """`done` of `total` units; a total of 0 is not known."""

    done: int = 0
    total: int = 0
    unit: str = ""


@dataclass(frozen=True)
class Job:
    """A job as the server gave it. Times are seconds since 1970-01-01 UTC, 0 for what has not happened."""

    job_id: str
    command: str
    settings: Mapping[str, str]
    state: JobState
    message: str = ""
    submitted_at_s: float = 0.0
    started_at_s: float = 0.0
    ended_at_s: float = 0.0
    attempts: int = 0
    exit_status: int | None = None
    out: str = ""
    progress: JobProgress = field(default_factory=JobProgress)
    metrics: Mapping[str, float] = field(default_factory=dict)
    result_json: str = ""
    revision: int = 0


@dataclass(frozen=True)
class LogChunk:
    """A piece of a job's log; the next begins at byte `next_offset`."""

    next_offset: int
    text: str


@dataclass(frozen=True)
class MetricsRow:
    """A row of a job's metrics; the next is number `next_offset`."""

    next_offset: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class TrainerInfo:
    """What a trainer offers, and how full it is."""

    commands: tuple[str, ...]
    slots: int
    running: int
    queued: int
