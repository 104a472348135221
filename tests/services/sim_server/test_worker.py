"""A simulator process ends with its parent, whoever that is and whoever adopts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CHILD = """
import os, sys
{as_process_1}
from services.sim_server.worker import die_with_parent
die_with_parent({parent})
os._exit(7)
"""


def exit_status(parent: int | str, as_process_1: bool = False) -> int:
    """Of a process that checks for its parent and then ends with 7."""
    code = CHILD.format(parent=parent, as_process_1="os.getppid = lambda: 1" if as_process_1 else "")
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60).returncode


def test_a_process_whose_parent_lives_goes_on() -> None:
    assert exit_status(os.getpid()) == 7


def test_a_parent_that_is_process_1_of_a_container_is_a_parent() -> None:
    assert exit_status(1, as_process_1=True) == 7


def test_an_orphan_ends_whoever_adopted_it() -> None:
    """To the child, this process is a subreaper: not process 1, and not the parent that was named."""
    assert exit_status(os.getpid() + 1) == 0
