"""The example's own environment behind real sockets, for every adapter's real library."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.own_environment import Reach
from worldserve.serving import RunningServer, ServerSettings, start_environment_server

# The goals of reach/train/0000 .. 0007 are -0.9, -0.643, -0.386, -0.129, 0.129, 0.386, 0.643 and 0.9.
STATES = ["reach/train/0006", "reach/train/0001"]


@pytest.fixture
def server() -> Iterator[RunningServer]:
    running = start_environment_server(Reach(), None, ServerSettings())
    yield running
    running.stop(0)


@pytest.fixture
def second_server() -> Iterator[RunningServer]:
    running = start_environment_server(Reach(), None, ServerSettings())
    yield running
    running.stop(0)
