"""The pytest plugin: options that name the server, and fixtures that open and close its episodes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from worldserve.client import EnvironmentClient
from worldserve.contract import Contract, Interface
from worldserve.faults import open_client
from worldserve.messages import (
    FrameSelection,
    ItemError,
    ResetItem,
    ResetReply,
    StepItem,
    StepReply,
    raise_for_errors,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("worldserve", "conformance of a server of worldserve.v1.EnvironmentService")
    group.addoption("--target", default="", metavar="HOST:PORT", help="the server")
    group.addoption("--state", default="", metavar="ID", help="an initial state that it knows")
    group.addoption("--other-state", default="", metavar="ID", help="another one")
    group.addoption("--target-timeout", type=float, default=120.0, metavar="SECONDS", help="deadline of a call")
    group.addoption("--target-fault", action="append", default=[], metavar="NAME", help="a fault made on purpose")


@dataclass
class Server:
    """The server under test."""

    client: EnvironmentClient
    contract: Contract
    state: str
    other_state: str
    timeout_s: float
    _prefix: str = field(default_factory=lambda: f"conformance-{uuid.uuid4().hex[:12]}")
    _names: list[str] = field(default_factory=list)

    @property
    def interface(self) -> Interface:
        """Its interface."""
        return self.contract.interface

    @property
    def size(self) -> int:
        """Actions of a chunk."""
        return self.interface.timing.chunk_actions

    def name(self) -> str:
        """A new episode's id; what bears it is closed after the test."""
        self._names.append(f"{self._prefix}/{len(self._names)}")
        return self._names[-1]

    def open(self, seed: int = 3) -> ResetReply:
        """A new episode at `state`."""
        [reply] = raise_for_errors(self.client.reset([ResetItem(self.name(), self.state, seed)]))
        return reply

    def chunk(self, opened: ResetReply, shift: float = 0.0) -> NDArray[np.float32]:
        """A chunk that holds the reset state, float32 (chunk_actions, dimensions); `shift` moves the first number."""
        actions = np.repeat(opened.proprioception[None], self.size, axis=0)
        actions[:, 0] += np.float32(shift)
        return actions

    def step(
        self,
        opened: ResetReply,
        index: int,
        actions: NDArray[np.float32] | None = None,
        frames: FrameSelection | None = None,
    ) -> StepReply | ItemError:
        """One chunk; it holds still by default."""
        given = self.chunk(opened) if actions is None else actions
        [reply] = self.client.step([StepItem(opened.episode_id, index, given, frames or FrameSelection.last())])
        return reply

    def close(self) -> None:
        """Frees what the test opened."""
        if self._names:
            self.client.close_episodes(self._names)
            self._names.clear()


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
