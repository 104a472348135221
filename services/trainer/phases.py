"""What each phase of a job cost: seconds of CPU by process, and of wall time, added up over resumed runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from services.trainer.json_files import read_json, write_json

TRAINER = "trainer"
WALL = "wall_s"


class PhaseClock:
    """Adds up `wall_s` and CPU-seconds a process for each phase, in a JSON file that every phase's end rewrites.

    Args:
        path: the file; what an earlier run left there is added to.
        read_servers: CPU-seconds so far of each server by name (monotonic; a server may appear during a phase).
    """

    def __init__(self, path: Path, read_servers: Callable[[], Mapping[str, float]] = dict) -> None:
        self._path, self._read_servers = path, read_servers
        self.phases: dict[str, dict[str, float]] = read_json(path) if path.exists() else {}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Charge what happens inside to `phase`, also when it is interrupted."""
        wall, before = time.perf_counter(), self._cpu()
        try:
            yield
        finally:
            total = self.phases.setdefault(phase, {})
            total[WALL] = total.get(WALL, 0.0) + time.perf_counter() - wall
            for name, seconds in self._cpu().items():
                spent = max(0.0, seconds - before.get(name, 0.0))  # a server that ended reads 0
                total[name] = total.get(name, 0.0) + spent
            write_json(self._path, self.phases)

    @property
    def wall_s(self) -> float:
        """Of all phases together."""
        return sum(phase[WALL] for phase in self.phases.values())

    def _cpu(self) -> dict[str, float]:
        return {TRAINER: time.process_time(), **self._read_servers()}
