"""The client with faults, over a real socket: the same calls and replies as any client's."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from worldserve.client import CallFailedError, EnvironmentClient
from worldserve.faults import FaultyClient, open_client
from worldserve.messages import FrameSelection, ReplayItem, ReplayOutcome, ResetItem, StepItem, raise_for_errors
from worldserve.probing.world import ProbeWorld, probe_world_interface, success_actions
from worldserve.serving import RunningServer, ServerSettings, start_environment_server

STATE = "probe/state/0000"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = start_environment_server(ProbeWorld(), None, ServerSettings())
    yield running
    running.stop(0)


def outcome(server: RunningServer, *faults: str) -> ReplayOutcome:
    with open_client(server.address, faults, interface=probe_world_interface()) as client:
        [(_, found)] = client.replay([ReplayItem("a", STATE, 0, success_actions())])
        assert client.info().live == 0
    assert isinstance(found, ReplayOutcome)
    return found


def test_no_fault_is_a_plain_client(server: RunningServer) -> None:
    with open_client(server.address) as client:
        assert type(client) is EnvironmentClient


def test_a_replay_through_a_fault_that_changes_no_frame_is_the_servers_own(server: RunningServer) -> None:
    plain, reward_moved = outcome(server), outcome(server, "reward_moved")
    assert plain == reward_moved
    assert plain.success is True


@pytest.mark.parametrize("shape", [(0, 14), (75, 14), (250, 14), (50, 13)])
def test_a_replay_of_another_shape_is_refused_as_a_server_does(server: RunningServer, shape: tuple[int, int]) -> None:
    item = ReplayItem("a", STATE, 0, np.zeros(shape, np.float32))
    refused = []
    for faults in ([], ["reward_moved"]):
        with open_client(server.address, faults, interface=probe_world_interface()) as client:
            [(_, error)] = client.replay([item])
        refused.append((error.code, error.reason, error.expected, error.got, error.advice))  # type: ignore[union-attr]
    assert refused[0] == refused[1]
    assert refused[0][1] == "WRONG_SHAPE"


def test_swapped_arms_lift_nothing(server: RunningServer) -> None:
    swapped = outcome(server, "arms_swapped")
    assert (swapped.success, swapped.total_reward) == (False, 0.0)
    assert outcome(server, "arms_swapped", "success_merged").success is True


def test_streamed_frames_are_the_distorted_ones(server: RunningServer) -> None:
    with FaultyClient(server.address, ["colours_swapped"], interface=probe_world_interface()) as client:
        [opened] = raise_for_errors(client.reset([ResetItem("s", STATE)]))
        assert [index for index, _ in client.read_frames("s", -1)] == [0]
        chunk = success_actions()[:50]
        [reply] = raise_for_errors(client.step([StepItem("s", 0, chunk, FrameSelection.every(10, stream=True))]))
        assert len(reply.frames) == 0
        read = list(client.read_frames("s", 0))
        assert [index for index, _ in read] == [10, 20, 30, 40, 50]
        # The sky is bluer than red; exchanged, it is not.
        assert opened.frame[0, 0].tolist() == read[-1][1][0, 0].tolist() == [170, 160, 150]
        with pytest.raises(CallFailedError) as caught:
            list(client.read_frames("s", -1))
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
        client.close_episodes(["s"])


def test_a_servers_own_errors_come_through(server: RunningServer) -> None:
    with FaultyClient(server.address, ["arms_swapped", "delta_actions"], interface=probe_world_interface()) as client:
        raise_for_errors(client.reset([ResetItem("e", STATE)]))
        bad = np.full((50, 14), np.nan, np.float32)
        errors = [*client.step([StepItem("e", 0, bad)]), *client.step([StepItem("e", 3, success_actions()[:50])])]
        assert [getattr(error, "reason", None) for error in errors] == ["NON_FINITE_ACTION", "CHUNK_INDEX_OUT_OF_ORDER"]
        client.close_episodes(["e"])
