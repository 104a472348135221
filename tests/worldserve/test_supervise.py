"""A command under a supervisor: its status is known, and nothing of it is left, however it or its parent ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from worldserve.supervise import end_supervised, process_start_ticks, start_supervised

# Stands in for a command: it starts a worker in its group, says who both are, and ends as told.
COMMAND = """
import os, signal, subprocess, sys, time
kind, pids = sys.argv[1:]
worker = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
if kind == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif kind == "orderly":
    signal.signal(signal.SIGTERM, lambda *_: (print("checkpoint written", flush=True), sys.exit(3)))
open(pids + ".part", "w").write(f"{os.getpid()} {worker.pid}")
os.rename(pids + ".part", pids)
print("started", kind, flush=True)
if kind == "done":
    sys.exit(0)
if kind == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
while True:
    time.sleep(0.05)
"""
PARENT = """
import sys, time
from pathlib import Path
from worldserve.supervise import start_supervised
base = Path(sys.argv[1])
start_supervised(["a_command", sys.argv[2], str(base / "pids")], base / "log", exit_file=base / "exit.json", grace_s=0.3)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "a_command.py").write_text(COMMAND)
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{root}")
    yield
    if (tmp_path / "pids").exists():
        for pid in map(int, (tmp_path / "pids").read_text().split()):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool]) -> bool:
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.05)
    return False


def alive(pid: int) -> bool:
    return process_start_ticks(pid) is not None


def started(base: Path) -> list[int]:
    assert wait_until(lambda: (base / "pids").exists())
    return [int(pid) for pid in (base / "pids").read_text().split()]


@pytest.mark.parametrize(("kind", "status", "returned"), [("done", 0, 0), ("crash", -11, 139)])
def test_how_a_command_ended_is_written_down_and_its_worker_is_gone(
    tmp_path: Path, kind: str, status: int, returned: int
) -> None:
    arguments = ["a_command", kind, str(tmp_path / "pids")]
    process = start_supervised(arguments, tmp_path / "log", exit_file=tmp_path / "exit.json")
    assert process.wait() == returned
    assert json.loads((tmp_path / "exit.json").read_text()) == {"status": status, "asked": False}
    assert wait_until(lambda: not any(alive(pid) for pid in started(tmp_path)))
    assert f"started {kind}" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("kind", "returned"), [("orderly", 3), ("stubborn", 137)])
def test_a_command_is_asked_first_and_then_killed_with_its_workers(tmp_path: Path, kind: str, returned: int) -> None:
    process = start_supervised(["a_command", kind, str(tmp_path / "pids")], tmp_path / "log", grace_s=0.3)
    pids = started(tmp_path)
    assert wait_until(lambda: f"started {kind}" in (tmp_path / "log").read_text())
    assert end_supervised(process) == returned
    assert wait_until(lambda: not any(alive(pid) for pid in pids))
    assert ("checkpoint written" in (tmp_path / "log").read_text()) == (kind == "orderly")


@pytest.mark.parametrize("kind", ["orderly", "stubborn"])
def test_a_parent_killed_outright_takes_command_and_workers_along(tmp_path: Path, kind: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), kind], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    pids = started(tmp_path)
    parent.kill()
    parent.communicate()
    assert wait_until(lambda: not any(alive(pid) for pid in pids))
    assert wait_until(lambda: (tmp_path / "exit.json").exists())
    assert json.loads((tmp_path / "exit.json").read_text())["asked"] is True


def test_a_process_is_named_by_its_id_and_its_start() -> None:
    assert process_start_ticks(os.getpid()) == process_start_ticks(os.getpid()) is not None
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start_ticks(child.pid) is None  # a zombie
    child.wait()
