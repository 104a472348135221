"""The pytest plugin: options that name the server under test. Its fixtures are the suite's own (`conftest.py`).

It is loaded wherever worldserve is installed, so that its options bear the package's name: a plain `--target` would
be refused beside another plugin's.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("worldserve", "conformance of a server of worldserve.v1.EnvironmentService")
    group.addoption("--worldserve-target", default="", metavar="HOST:PORT", help="the server")
    group.addoption(
        "--worldserve-states", nargs=2, default=("", ""), metavar=("ID", "ID"), help="two initial states that it knows"
    )
    group.addoption("--worldserve-timeout", type=float, default=120.0, metavar="SECONDS", help="deadline of a call")
    group.addoption("--worldserve-fault", action="append", default=[], metavar="NAME", help="a fault made on purpose")
