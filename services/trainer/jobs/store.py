"""Jobs on disk: JOBS/ID/job.json, replaced whole at every change; log.txt and out/ beside it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.trainer.directories import claim
from services.trainer.json_files import read_json, write_json
from worldserve.jobs import JobState

RECORD = "job.json"


@dataclass(frozen=True)
class JobRecord:
    """What is kept of a job; fields that `worldserve.jobs.Job` has too mean the same.

    Attributes:
        arguments: of the command, made of the checked settings.
        resume: whether the command takes --resume.
        total, unit: of its progress, as far as the settings say.
        pid, start_ticks: of the supervisor of its newest attempt; 0 before the first.
    """

    job_id: str
    command: str
    settings: Mapping[str, str]
    arguments: tuple[str, ...]
    resume: bool
    out: str
    total: int = 0
    unit: str = ""
    state: JobState = JobState.QUEUED
    message: str = ""
    submitted_at_s: float = 0.0
    started_at_s: float = 0.0
    ended_at_s: float = 0.0
    attempts: int = 0
    exit_status: int | None = None
    pid: int = 0
    start_ticks: int = 0
    revision: int = 0


class JobStore:
    """All jobs of one directory, in memory and on disk. Every change is written before it is seen.

    Raises:
        RuntimeError: while another server has the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lock = threading.RLock()
        self._lock_file = claim(
            directory, f"jobs: another trainer serves the jobs in {directory}; use that one, or name another --jobs"
        )
        self._records: dict[str, JobRecord] = {}
        for path in sorted(directory.glob(f"*/{RECORD}")):
            record = _from_json(path)
            self._records[record.job_id] = record

    def get(self, job_id: str) -> JobRecord | None:
        """A job by its name."""
        with self.lock:
            return self._records.get(job_id)

    def all(self) -> list[JobRecord]:
        """Every job, oldest first."""
        with self.lock:
            return sorted(self._records.values(), key=lambda record: (record.submitted_at_s, record.job_id))

    def add(self, record: JobRecord) -> None:
        """A new job."""
        with self.lock:
            assert record.job_id not in self._records
            self._write(dataclasses.replace(record, revision=1))

    def change(self, job_id: str, **changes: Any) -> JobRecord:
        """Changes fields of a job; its revision grows."""
        with self.lock:
            before = self._records[job_id]
            record = dataclasses.replace(before, **changes, revision=before.revision + 1)
            self._write(record)
            return record

    def directory_of(self, job_id: str) -> Path:
        """Where a job's files lie."""
        return self.directory / job_id

    def log_of(self, job_id: str) -> Path:
        """A job's log."""
        return self.directory / job_id / "log.txt"

    def exit_file_of(self, job_id: str) -> Path:
        """Where a job's supervisor writes how the command ended."""
        return self.directory / job_id / "exit.json"

    def close(self) -> None:
        """Lets another server have the directory."""
        self._lock_file.close()

    def _write(self, record: JobRecord) -> None:
        values = {**dataclasses.asdict(record), "state": record.state.value}
        write_json(self.directory / record.job_id / RECORD, values)
        self._records[record.job_id] = record


def _from_json(path: Path) -> JobRecord:
    try:
        values = read_json(path)
        return JobRecord(**{**values, "state": JobState(values["state"]), "arguments": tuple(values["arguments"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: expected a job as this version writes it; {error}. Move it aside.") from None
