"""Starts, watches and ends the processes of jobs, and takes them up again after the server's own end.

One thread does all of it: Linux takes the end of the thread that started a process for the parent's death, so that
thread lives as long as the server.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from services.trainer.jobs.store import JobRecord, JobStore
from worldserve.jobs import JobState
from worldserve.serving.launcher import SERVER_ENVIRONMENT
from worldserve.supervise import process_start_ticks, start_supervised

_log = logging.getLogger("worldserve.jobs")
_POLL_S = 0.1


class JobScheduler:
    """Jobs of a store as processes, at most `slots` at once, oldest first.

    Args:
        module: what `python -m` runs, the job's arguments following.
        grace_s: how long a command may take to end once asked; then its process group is killed.
    """

    def __init__(self, store: JobStore, slots: int, grace_s: float, module: str = "worldserve.cli") -> None:
        self._store, self.slots, self._grace_s, self._module = store, slots, grace_s, module
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._cancelled: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)

    def start(self) -> None:
        """Takes up what an earlier server left, and begins."""
        self._recover()
        self._thread.start()

    def stop(self) -> None:
        """Ends every job's process; what ran is queued again, for the next server."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
            except Exception:  # a full disk, say: what can go on does, and the log says why the rest does not
                _log.exception("jobs: a turn failed")
            self._stopping.wait(_POLL_S)
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for job_id, process in list(self._processes.items()):
            process.wait()
            self._ended(job_id, process.returncode, interrupted=True)

    def _turn(self) -> None:
        for job_id, process in list(self._processes.items()):
            if process.poll() is not None:
                self._ended(job_id, process.returncode, interrupted=False)
        for record in self._store.all():
            if record.state is JobState.CANCELLING and record.job_id not in self._cancelled:
                running = self._processes.get(record.job_id)
                if running is not None:
                    self._cancelled.add(record.job_id)
                    running.terminate()
            if record.state is JobState.QUEUED and len(self._processes) < self.slots:
                self._begin(record)

    def _begin(self, record: JobRecord) -> None:
        attempt = record.attempts + 1
        arguments = list(record.arguments)
        if attempt > 1:
            # What an earlier attempt left is what this one goes on with.
            arguments = [word for word in arguments if word not in ("--fresh", "--resume", "--no-resume")]
            arguments += ["--resume"] if record.resume else []
        log = self._store.log_of(record.job_id)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            file.write(f"--- attempt {attempt}, {now}: worldserve {' '.join(arguments)}\n")
        with self._store.lock:  # a cancellation comes before or after, never between
            found = self._store.get(record.job_id)
            if found is None or found.state is not JobState.QUEUED:
                return
            process = start_supervised(
                [self._module, *arguments],
                log,
                environment={**SERVER_ENVIRONMENT, **{n: os.environ[n] for n in SERVER_ENVIRONMENT if n in os.environ}},
                exit_file=self._store.exit_file_of(record.job_id),
                grace_s=self._grace_s,
            )
            self._processes[record.job_id] = process
            self._store.change(
                record.job_id, state=JobState.RUNNING, message="", attempts=attempt, started_at_s=time.time(),
                pid=process.pid, start_ticks=process_start_ticks(process.pid) or 0,
            )  # fmt: skip

    def _ended(self, job_id: str, returned: int, interrupted: bool) -> None:
        with self._store.lock:
            self._processes.pop(job_id)
            self._cancelled.discard(job_id)
            record = self._store.get(job_id)
            assert record is not None
            found = read_exit(self._store, job_id)
            status = found["status"] if found else returned
            self._store.change(job_id, **self._outcome(record, status, interrupted))

    def _outcome(self, record: JobRecord, status: int, interrupted: bool) -> dict[str, Any]:
        """How a job whose process ended goes on."""
        ended = {"exit_status": status, "ended_at_s": time.time()}
        if status == 0:
            return {**ended, "state": JobState.SUCCEEDED, "message": ""}
        if record.state is JobState.CANCELLING:
            return {**ended, "state": JobState.CANCELLED, "message": "cancelled"}
        if interrupted:
            message = "interrupted by the end of its server; goes on from where it was"
            return {"state": JobState.QUEUED, "message": message}
        how = f"exit status {status}" if status > 0 else signal.Signals(-status).name
        return {**ended, "state": JobState.FAILED, "message": f"{how}: {self._last_line(record.job_id)}"}

    def _last_line(self, job_id: str) -> str:
        lines = self._store.log_of(job_id).read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip() and not line.startswith("--- attempt")]
        return said[-1][:500] if said else "it wrote nothing"

    def _recover(self) -> None:
        """Jobs that ran when the last server ended: their processes are gone, or go now; then they are queued again."""
        left = [record for record in self._store.all() if record.state in (JobState.RUNNING, JobState.CANCELLING)]
        for record in left:
            if _alive(record):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGTERM)
        for record in left:
            while _alive(record):  # the supervisor itself kills what does not end within the grace period
                time.sleep(_POLL_S)
            found = read_exit(self._store, record.job_id)
            # Without being asked it ended by itself, while its server was going.
            interrupted = found is None or bool(found["asked"])
            status = int(found["status"]) if found else -int(signal.SIGKILL)
            change = self._outcome(record, status, interrupted)
            self._store.change(record.job_id, **change)
            _log.info("job %s: %s", record.job_id, change["state"].value)


def read_exit(store: JobStore, job_id: str) -> Mapping[str, Any] | None:
    """How a job's command ended, as its supervisor wrote it; None where it could not."""
    try:
        found = json.loads(store.exit_file_of(job_id).read_text(encoding="utf-8"))
        return {"status": int(found["status"]), "asked": bool(found["asked"])}
    except (OSError, ValueError, KeyError):
        return None


def _alive(record: JobRecord) -> bool:
    return record.pid > 0 and process_start_ticks(record.pid) == record.start_ticks
