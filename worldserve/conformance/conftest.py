"""Fixtures of the suite: the server that the options name, and no episode of it left open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from worldserve.client import EnvironmentClient
from worldserve.conformance.server import Server
from worldserve.faults import open_client


@pytest.fixture(scope="session")
def connected(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The server that the options name; a skip without --target."""
    target = request.config.getoption("--target")
    if not target:
        pytest.skip("no server is named: give --target HOST:PORT --state ID --other-state ID")
    state, other = request.config.getoption("--state"), request.config.getoption("--other-state")
    if not (state and other) or state == other:
        pytest.fail(
            f"--state, --other-state: expected two initial states that {target} knows; got {state!r}, {other!r}"
        )
    timeout_s = request.config.getoption("--target-timeout")
    with EnvironmentClient(target, timeout_s=timeout_s) as asking:
        contract = asking.get_contract()
    faults = request.config.getoption("--target-fault")
    with open_client(target, faults, timeout_s=timeout_s, interface=contract.interface) as client:
        yield Server(client, contract, state, other, timeout_s)


@pytest.fixture
def server(connected: Server) -> Iterator[Server]:
    """The server, with no episode of this suite open before or after."""
    yield connected
    connected.close()
