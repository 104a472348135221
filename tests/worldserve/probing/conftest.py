"""The small world's servers, once for all tests of the probes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from worldserve.probing.small import SmallServers, small_servers


@pytest.fixture(scope="session")
def small() -> Iterator[SmallServers]:
    with small_servers() as servers:
        yield servers
