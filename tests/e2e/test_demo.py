"""The whole loop with the shipped weights, as `make demo` runs it but tiny: interrupted once, then to its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = [
    *(ROOT / "weights" / name / "model.safetensors" for name in ("reward", "policy-sft", "bwm-mini")),
    ROOT / "recipes" / "mini.yaml",
]
MARK = "WORLDSERVE_E2E_MARK"
# A job in a shell's background ignores Ctrl-C, and its children inherit that.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from worldserve.cli import main
sys.exit(main(sys.argv[1:]))
"""

pytestmark = pytest.mark.e2e


def processes_with(mark: str) -> list[str]:
    """Command lines of the running processes that inherited `mark`."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in environment.read_bytes().split(b"\0"):
                found.append((environment.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def start(out: Path, mark: str) -> subprocess.Popen[bytes]:
    """`worldserve demo --tiny` in a process group of its own; what it prints goes to a file beside `out`."""
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "demo", "--tiny", "--out", str(out)],
            cwd=ROOT,
            env={**os.environ, MARK: mark},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def test_what_the_demo_needs_is_in_the_checkout() -> None:
    assert [str(path.relative_to(ROOT)) for path in NEEDED if not path.is_file()] == []


@pytest.mark.timeout(1200)
def test_interrupted_demo_leaves_no_process_and_the_next_call_finishes_it(tmp_path: Path) -> None:
    out, mark = tmp_path / "demo", uuid.uuid4().hex
    first = start(out, mark)
    try:
        while not (out / "evaluate" / "sft" / "result.json").exists():
            assert first.poll() is None, out.with_suffix(".log").read_text()
            time.sleep(0.1)
        assert len(processes_with(mark)) >= 4  # the demo and its three servers
        os.killpg(first.pid, signal.SIGINT)
        assert first.wait(timeout=120) == 130, out.with_suffix(".log").read_text()
        assert processes_with(mark) == []

        second = start(out, mark)
        assert second.wait(timeout=900) == 0, out.with_suffix(".log").read_text()
        assert processes_with(mark) == []
    finally:
        for process in (first, locals().get("second")):
            if process is not None and process.poll() is None:
                process.kill()  # its servers follow it
                process.wait()

    rows = [json.loads(line) for line in (out / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1]
    assert all(row["env/episodes"] == 4 and "env/verdict" in row for row in rows)
    for name in ("sft", "ppo"):
        result = json.loads((out / "evaluate" / name / "result.json").read_text())
        assert result["success"]["count"] == 4
    assert "success_gain" in result
    page = (out / "report.html").read_text()
    assert page.count("data:video/mp4") == 1
    for server in json.loads((out / "servers.json").read_text()):
        assert server["provenance_fingerprint"] in page
    interfaces = {server["interface_fingerprint"] for server in json.loads((out / "servers.json").read_text())}
    assert len(interfaces) == 1
