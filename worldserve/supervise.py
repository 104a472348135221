"""One command as a process group that leaves nothing behind, however it or its parent ends.

    process = start_supervised(["worldserve.cli", "ppo", "--out", "runs/a"], Path("runs/a.log"))
    ...
    end_supervised(process)

Between the parent and the command stands a small supervisor (this module as a program). It leads a session of its own,
so Ctrl-C in a terminal reaches the parent alone. Where the parent asks (SIGTERM) or dies, even by SIGKILL (Linux,
prctl PR_SET_PDEATHSIG), it asks the command with SIGTERM, waits, and kills the command's whole process group. It also
writes down how the command ended, for a parent that is no longer there to hear it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from worldserve.files import replace_text

# What the supervisor itself returns when its command could not be started.
EXIT_NOT_STARTED = 127
GRACE_S = 20.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
# Run in the command's process before the command. In Python and not between fork and exec (preexec_fn), which is not
# safe beside threads.
_EXEC = (
    "import ctypes, os, signal, sys\n"
    "parent, *rest = sys.argv[1:]\n"
    "if sys.platform == 'linux':\n"
    "    ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "if os.getppid() != int(parent):\n"
    "    sys.exit('the supervisor of this command is gone')\n"
    "os.execv(sys.executable, [sys.executable, '-m', *rest])\n"
)


def start_supervised(
    arguments: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    exit_file: Path | None = None,
    grace_s: float = GRACE_S,
    directory: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Starts `python -m ARGUMENTS` under a supervisor; the returned process is the supervisor.

    Call it from a thread that lives as long as the command may: Linux takes the end of the starting *thread* for the
    parent's death.

    Args:
        arguments: a module and its arguments.
        log: the command's standard output and error are appended to it.
        environment: variables on top of this process's.
        exit_file: where {"status": ..., "asked": ...} is written when the command has ended: its exit status (minus the
            signal's number where a signal ended it), and whether it was asked to end.
        grace_s: how long the command may take to end once asked; then its process group is killed.
        directory: the working directory (none: this process's).
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    options = ["--parent", str(os.getpid()), "--grace-s", str(grace_s)]
    if exit_file is not None:
        exit_file.unlink(missing_ok=True)
        options += ["--exit-file", str(exit_file.resolve())]
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "worldserve.supervise", *options, "--", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            cwd=directory,
            start_new_session=True,
        )


def end_supervised(process: subprocess.Popen[bytes]) -> int:
    """Asks a command to end, waits until its group is gone, and returns its exit status."""
    if process.poll() is None:
        process.terminate()
    return process.wait()


def process_start_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot: with the pid it names a process for good.

    None where there is no such process, or it is a zombie (proc(5), fields 3 and 22).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def main(argv: Sequence[str] | None = None) -> int:
    """The supervisor: returns the command's exit status, 128 + N where signal N ended it."""
    parser = argparse.ArgumentParser("python -m worldserve.supervise", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id of who started this")
    parser.add_argument("--grace-s", type=float, default=GRACE_S)
    parser.add_argument("--exit-file", type=Path)
    parser.add_argument("command", nargs="+", help="module and arguments, after --")
    arguments = parser.parse_args(argv)
    asked = _Asked()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, asked)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != arguments.parent:
        print("supervise: the process that started this command is gone", file=sys.stderr)
        return EXIT_NOT_STARTED
    child = subprocess.Popen(
        [sys.executable, "-c", _EXEC, str(os.getpid()), *arguments.command], start_new_session=True
    )
    status = _watch(child, asked, arguments.grace_s)
    if arguments.exit_file is not None:
        text = json.dumps({"status": status, "asked": asked.times > 0}) + "\n"
        with contextlib.suppress(OSError):  # its directory was removed: nobody will read it
            replace_text(arguments.exit_file, text)
    return status if status >= 0 else 128 - status


class _Asked:
    """Counts the signals that ask for an end; the second one asks for it at once."""

    def __init__(self) -> None:
        self.times, self.first = 0, 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.times += 1
        self.first = self.first or time.monotonic()


def _watch(child: subprocess.Popen[bytes], asked: _Asked, grace_s: float) -> int:
    """Waits for the command's end, and kills what is left of its group before its process id is free again."""
    told = False
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if asked.times and not told:
            child.terminate()
            told = True
        if asked.times > 1 or (told and time.monotonic() - asked.first > grace_s):
            break
        time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
