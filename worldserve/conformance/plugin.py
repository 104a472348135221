"""The pytest plugin: options that name the server under test. Its fixtures are the suite's own (`conftest.py`)."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("worldserve", "conformance of a server of worldserve.v1.EnvironmentService")
    group.addoption("--target", default="", metavar="HOST:PORT", help="the server")
    group.addoption("--state", default="", metavar="ID", help="an initial state that it knows")
    group.addoption("--other-state", default="", metavar="ID", help="another one")
    group.addoption("--target-timeout", type=float, default=120.0, metavar="SECONDS", help="deadline of a call")
    group.addoption("--target-fault", action="append", default=[], metavar="NAME", help="a fault made on purpose")
