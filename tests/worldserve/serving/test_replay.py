"""Replay: which item an error names, and which error it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import grpc
import numpy as np
import pytest

from tests.worldserve.serving.conftest import KNOWN_STATE, StubBackend, chunk
from worldserve.client import EnvironmentClient
from worldserve.contract import fingerprint
from worldserve.messages import BackendChunk, BackendStep, ItemError, ReplayItem
from worldserve.serving import RunningServer, errors
from worldserve.wire.generated import common_pb2, environment_pb2, environment_pb2_grpc


@pytest.fixture
def backend() -> StubBackend:
    """Room for more episodes than one Replay runs side by side (8)."""
    return StubBackend(capacity=16)


def test_a_replay_names_its_failed_items_by_their_place_in_the_call(
    client: EnvironmentClient,
) -> None:
    actions = np.concatenate([chunk()] * 4)
    unfinite = actions.copy()
    unfinite[120, 3] = np.nan
    items = [ReplayItem(f"r{number}", KNOWN_STATE, number, actions) for number in range(12)]
    items[3] = dataclasses.replace(items[3], actions=actions[:30])
    items[5] = dataclasses.replace(items[5], initial_state_id="adjust_bottle/train/9")
    items[9] = dataclasses.replace(items[9], actions=unfinite)
    items[11] = dataclasses.replace(items[11], initial_state_id="adjust_bottle/train/9")
    outcomes = dict(client.replay(items))
    failed = {name: (one.reason, one.name) for name, one in outcomes.items() if isinstance(one, ItemError)}
    assert failed == {
        "r3": ("WRONG_SHAPE", "items[3].actions"),
        "r5": ("INITIAL_STATE_UNKNOWN", "items[5].initial_state_id"),
        "r9": ("NON_FINITE_ACTION", "items[9].actions[120, 3]"),
        "r11": ("INITIAL_STATE_UNKNOWN", "items[11].initial_state_id"),
    }


def test_a_replay_names_the_item_that_failed_in_a_later_chunk(
    client: EnvironmentClient, backend: StubBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = backend.step

    def fail_seed_10(items: Sequence[BackendStep]) -> list[BackendChunk | ItemError]:
        outcomes = honest(items)
        for place, item in enumerate(items):
            if item.chunk_index == 1 and backend.seeds[item.episode_id] == 10:
                outcomes[place] = errors.not_finite("frames", "pixels")
        return outcomes

    monkeypatch.setattr(backend, "step", fail_seed_10)
    one, two = chunk(), np.concatenate([chunk()] * 2)
    items = [ReplayItem(f"r{number}", KNOWN_STATE, number, one if number < 10 else two) for number in range(11)]
    [(_, failed)] = [(name, outcome) for name, outcome in client.replay(items) if isinstance(outcome, ItemError)]
    assert isinstance(failed, ItemError)
    assert (failed.reason, failed.name) == ("NON_FINITE_OUTPUT", "items[10].frames")


@pytest.mark.parametrize(
    ("dtype", "data", "reason"),
    [("float64", bytes(50 * 14 * 8), "WRONG_DTYPE"), ("float32", bytes(50 * 14 * 4 - 1), "WRONG_SHAPE")],
)
def test_a_replay_tells_a_wrong_dtype_from_missing_bytes(
    server: RunningServer, backend: StubBackend, dtype: str, data: bytes, reason: str
) -> None:
    item = environment_pb2.ReplayItem(
        episode_id="a", initial_state_id=KNOWN_STATE, actions=common_pb2.Array(dtype=dtype, shape=(50, 14), data=data)
    )
    request = environment_pb2.ReplayRequest(items=[item], interface_fingerprint=fingerprint(backend.contract.interface))
    with grpc.insecure_channel(server.address) as channel:
        [answer] = environment_pb2_grpc.EnvironmentServiceStub(channel).Replay(request, timeout=20)
    assert (answer.error.code, answer.error.reason) == ("INVALID_ARGUMENT", reason)
