"""Simulator processes and which episode lives where. A worker that dies is replaced, its episodes rebuilt."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from services.sim_server.worker import CloseScenes, Command, Done, Failed, OpenScene, RunChunk, work

_log = logging.getLogger("worldserve.sim")
SCENES_PER_WORKER = 64
# A chunk takes 0.06 to 0.3 s; a process that says nothing for this long, and more for each command, hangs.
HANG_S, HANG_PER_COMMAND_S = 60.0, 3.0


@dataclass
class _Record:
    """What rebuilds an episode: its scene and the actions executed so far."""

    scene: Mapping[str, float]
    chunks: list[NDArray[np.float32]] = field(default_factory=list)
    moved: bool = False  # a chunk failed half way: the scene is rebuilt before it is used again

    def actions(self) -> NDArray[np.float32]:
        return np.concatenate(self.chunks) if self.chunks else np.zeros((0, 14), np.float32)


class WorkerLostError(RuntimeError):
    """A worker died twice over the same commands."""


class _Worker:
    def __init__(self, number: int, camera: str) -> None:
        self.number, self._camera = number, camera
        self.lock = threading.Lock()
        self.records: dict[str, _Record] = {}
        self.restarts = 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(
            target=work, args=(theirs, self._camera), name=f"sim-worker-{self.number}", daemon=True
        )
        self._process.start()
        theirs.close()
        self._connection: Connection = ours

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def run(self, commands: Sequence[Command]) -> list[Done | Failed]:
        """Runs commands in order; after a death or a hang once more, in a new process, on rebuilt episodes."""
        with self.lock:
            for attempt in range(2):
                try:
                    self._restore(commands)
                    replies = self._exchange(commands)
                    break
                except (EOFError, OSError, TimeoutError) as error:
                    _log.warning(
                        "simulator worker %d lost (%r); rebuilding %d episodes", self.number, error, len(self.records)
                    )
                    if attempt:
                        self.kill()  # its late answer must not be taken for the next call's
                        raise WorkerLostError(f"simulator worker {self.number} died twice over one call") from error
                    self._rebuild()
            self._remember(commands, replies)
            return replies

    def _exchange(self, commands: Sequence[Command]) -> list[Done | Failed]:
        self._connection.send(list(commands))
        if not self._connection.poll(HANG_S + HANG_PER_COMMAND_S * len(commands)):
            raise TimeoutError("no answer")
        replies: list[Done | Failed] = self._connection.recv()
        return replies

    def _rebuild(self) -> None:
        self.kill()
        self.restarts += 1
        self._start()
        past: list[Command] = [OpenScene(name, r.scene, r.actions()) for name, r in self.records.items()]
        if past:
            self._exchange(past)

    def _restore(self, commands: Sequence[Command]) -> None:
        """Rebuilds the scenes of these commands whose last chunk failed half way."""
        moved = {
            command.episode_id: record
            for command in commands
            if isinstance(command, RunChunk) and (record := self.records.get(command.episode_id)) and record.moved
        }
        if moved:
            self._exchange([OpenScene(name, record.scene, record.actions()) for name, record in moved.items()])
        for record in moved.values():
            record.moved = False

    def _remember(self, commands: Sequence[Command], replies: Sequence[Done | Failed]) -> None:
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(command, CloseScenes):
                for name in command.episode_ids:
                    self.records.pop(name, None)
            elif isinstance(reply, Done):
                if isinstance(command, OpenScene):
                    self.records[command.episode_id] = _Record(
                        command.scene, [command.actions] if len(command.actions) else []
                    )
                else:
                    self.records[command.episode_id].chunks.append(command.actions)
            elif isinstance(command, RunChunk) and command.episode_id in self.records:
                self.records[command.episode_id].moved = True

    def kill(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()


class WorkerPool:
    """`workers` processes of 64 scenes each.

    Args:
        workers: processes; about one a core.
        camera: name of the camera.
    """

    def __init__(self, workers: int, camera: str) -> None:
        if workers < 1:
            raise ValueError(f"workers: expected at least 1; got {workers}")
        self._workers = [_Worker(number, camera) for number in range(workers)]
        self._threads = ThreadPoolExecutor(4 * workers, thread_name_prefix="pool")
        self._lock = threading.Lock()
        self._home: dict[str, _Worker] = {}
        self.capacity = workers * SCENES_PER_WORKER

    @property
    def pids(self) -> list[int]:
        """Process ids, for tests that kill."""
        return [worker.pid for worker in self._workers]

    @property
    def restarts(self) -> int:
        """Workers replaced so far."""
        return sum(worker.restarts for worker in self._workers)

    def open(self, scenes: Mapping[str, Mapping[str, float]]) -> dict[str, Done | Failed]:
        """Opens fresh scenes, spread evenly; outcomes by episode id."""
        with self._lock:
            load = {worker: sum(home is worker for home in self._home.values()) for worker in self._workers}
            for name in scenes:
                worker = min(self._workers, key=lambda one: load[one])
                self._home[name] = worker
                load[worker] += 1
        empty = np.zeros((0, 14), np.float32)
        return self._dispatch({name: OpenScene(name, scene, empty) for name, scene in scenes.items()})

    def step(self, chunks: Mapping[str, RunChunk]) -> dict[str, Done | Failed]:
        """Runs chunks; outcomes by episode id."""
        return self._dispatch(chunks)

    def close(self, episode_ids: Sequence[str]) -> None:
        """Frees scenes."""
        with self._lock:
            homes = {name: self._home.pop(name) for name in episode_ids if name in self._home}
        for worker in set(homes.values()):
            names = tuple(name for name, home in homes.items() if home is worker)
            worker.run([CloseScenes(names)])

    def shutdown(self) -> None:
        """Ends all processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def _dispatch(self, commands: Mapping[str, Command]) -> dict[str, Done | Failed]:
        """Sends each worker its commands, all workers at once."""
        with self._lock:
            groups: dict[_Worker, list[str]] = {}
            for name in commands:
                if name in self._home:
                    groups.setdefault(self._home[name], []).append(name)
        futures = {
            self._threads.submit(worker.run, [commands[name] for name in names]): names
            for worker, names in groups.items()
        }
        outcomes: dict[str, Done | Failed] = {name: Failed("no such episode") for name in commands}
        for future, names in futures.items():
            try:
                outcomes.update(zip(names, future.result(), strict=True))
            except WorkerLostError as error:
                outcomes.update(dict.fromkeys(names, Failed(str(error))))
        return outcomes
