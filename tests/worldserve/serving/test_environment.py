"""The contract over a real socket: episodes, idempotency, every error, neighbours untouched."""

from __future__ import annotations

import dataclasses
import threading
import time

import grpc
import numpy as np
import pytest

from tests.worldserve.serving.conftest import KNOWN_STATE, StubBackend, chunk, frame
from worldserve.client import CallFailedError, EnvironmentClient
from worldserve.contract import Observation, TerminationRule, adjust_bottle_interface, fingerprint
from worldserve.messages import (
    FrameSelection,
    ItemError,
    ReplayItem,
    ReplayOutcome,
    ResetItem,
    StepItem,
    raise_for_errors,
)
from worldserve.serving import (
    EnvironmentEngine,
    RunningServer,
    ServerMetrics,
    ServerSettings,
    start_environment_server,
)
from worldserve.wire.generated import common_pb2, environment_pb2, environment_pb2_grpc


def open_episode(client: EnvironmentClient, name: str = "a", seed: int = 3) -> None:
    [reply] = client.reset([ResetItem(name, KNOWN_STATE, seed)])
    assert not isinstance(reply, ItemError)


def test_an_episode_from_reset_to_its_end(client: EnvironmentClient, backend: StubBackend) -> None:
    [opened] = client.reset([ResetItem("a", KNOWN_STATE, 3)])
    assert not isinstance(opened, ItemError)
    assert (opened.episode_id, opened.initial_state_id, opened.seed) == ("a", KNOWN_STATE, 3)
    np.testing.assert_array_equal(opened.frame, frame(3, 0))
    assert opened.proprioception.tolist() == [0.0] * 6 + [1.0] + [0.0] * 6 + [1.0]

    for index, (elapsed, ended) in enumerate([(50, False), (100, False), (150, False), (200, True)]):
        [reply] = client.step([StepItem("a", index, chunk())])
        assert not isinstance(reply, ItemError)
        assert (reply.committed_chunk_index, reply.elapsed_steps, reply.terminated) == (index, elapsed, ended)
        assert (reply.truncated, reply.end_reason) == (False, "limit" if ended else "")
        assert reply.frame_indices.tolist() == [elapsed]
        np.testing.assert_array_equal(reply.frames[0], frame(3, elapsed))
        np.testing.assert_array_equal(reply.proprioception, reply.executed_actions[-1])
        # One value, at the last action, and nothing before it.
        assert reply.rewards.tolist() == [0.0] * 49 + [1.0 if ended else 0.0]
        assert reply.success is True
        assert reply.verdict is None
    assert client.close_episodes(["a"]) == 1
    assert client.close_episodes(["a"]) == 0
    assert backend.closed == ["a"]


@pytest.mark.parametrize(
    ("selection", "indices"),
    [
        (FrameSelection.none(), []),
        (FrameSelection.last(), [50]),
        (FrameSelection.every(20), [10, 30, 50]),
        (FrameSelection.every(1), list(range(1, 51))),
    ],
)
def test_only_the_frames_asked_for_are_drawn(
    client: EnvironmentClient, selection: FrameSelection, indices: list[int]
) -> None:
    open_episode(client)
    [reply] = client.step([StepItem("a", 0, chunk(), selection)])
    assert not isinstance(reply, ItemError)
    assert reply.frame_indices.tolist() == indices
    assert reply.frames.shape == (len(indices), 96, 128, 3)


def test_streamed_frames_are_read_after_the_step(client: EnvironmentClient) -> None:
    open_episode(client)
    assert [index for index, _ in client.read_frames("a", -1)] == [0]
    [reply] = client.step([StepItem("a", 0, chunk(), FrameSelection.every(1, stream=True))])
    assert not isinstance(reply, ItemError)
    assert len(reply.frames) == 0
    read = list(client.read_frames("a", 0))
    assert [index for index, _ in read] == list(range(1, 51))
    np.testing.assert_array_equal(read[-1][1], frame(3, 50))
    with pytest.raises(CallFailedError) as caught:
        list(client.read_frames("a", -1))
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_out_of_range_actions_are_clipped_counted_and_returned(client: EnvironmentClient) -> None:
    open_episode(client)
    wild = chunk()
    wild[0, 0], wild[10, 6] = 9.0, 2.0
    [reply] = client.step([StepItem("a", 0, wild)])
    assert not isinstance(reply, ItemError)
    assert reply.clipped_count == 2
    assert reply.executed_actions[0, 0] == np.float32(0.15)
    assert reply.executed_actions[10, 6] == 1.0


def test_a_repeated_step_returns_the_stored_reply_and_runs_nothing(
    client: EnvironmentClient, backend: StubBackend
) -> None:
    open_episode(client)
    [first] = client.step([StepItem("a", 0, chunk(), FrameSelection.every(10))])
    [again] = client.step([StepItem("a", 0, chunk(), FrameSelection.last())])
    assert not isinstance(first, ItemError) and not isinstance(again, ItemError)
    assert backend.runs == [("a", 0)]
    np.testing.assert_array_equal(first.frames, again.frames)
    assert first.frame_indices.tolist() == again.frame_indices.tolist() == [10, 20, 30, 40, 50]


def test_a_repeated_reset_opens_one_episode(client: EnvironmentClient, backend: StubBackend) -> None:
    open_episode(client)
    open_episode(client)
    assert backend.resets == ["a"]
    assert client.info().live == 1


def test_two_duplicates_at_once_run_once(server: RunningServer, backend: StubBackend) -> None:
    backend.gate = threading.Event()
    replies: list[object] = []
    with EnvironmentClient(server.address) as one, EnvironmentClient(server.address) as two:
        open_episode(one)
        threads = [
            threading.Thread(target=lambda c=c: replies.extend(c.step([StepItem("a", 0, chunk())]))) for c in (one, two)
        ]
        for thread in threads:
            thread.start()
        backend.gate.set()
        for thread in threads:
            thread.join(20)
    assert backend.runs == [("a", 0)]
    assert [type(reply).__name__ for reply in replies] == ["StepReply", "StepReply"]


BAD = np.nan * np.ones((50, 14), np.float32)
ERRORS = [
    # item, code, reason, name, expected, got
    (StepItem("nobody", 0, chunk()), "NOT_FOUND", "EPISODE_UNKNOWN", "items[1].episode_id", "the id of an open episode", "'nobody'"),
    (StepItem("ended", 4, chunk()), "FAILED_PRECONDITION", "EPISODE_ENDED", "items[1]", "an episode that runs", "'ended', ended (limit) after 4 chunks"),
    (StepItem("b", 2, chunk()), "FAILED_PRECONDITION", "CHUNK_INDEX_OUT_OF_ORDER", "items[1].chunk_index", "chunk_index 1", "2"),
    (StepItem("b", -1, chunk()), "FAILED_PRECONDITION", "CHUNK_INDEX_OUT_OF_ORDER", "items[1].chunk_index", "chunk_index 1", "-1"),
    (StepItem("b", 0, chunk(0.05)), "ALREADY_EXISTS", "CHUNK_COMMITTED_WITH_OTHER_ACTIONS", "items[1].actions", "the actions that chunk 0 was committed with", "other actions"),
    (StepItem("b", 1, chunk()[:49]), "INVALID_ARGUMENT", "WRONG_SHAPE", "items[1].actions", "shape (50, 14)", "shape (49, 14)"),
    (StepItem("b", 1, chunk().astype(np.int32)), "INVALID_ARGUMENT", "WRONG_DTYPE", "items[1].actions", "dtype float32", "\"dtype 'int32'\""),
    (StepItem("b", 1, BAD), "INVALID_ARGUMENT", "NON_FINITE_ACTION", "items[1].actions[0, 0]", "a finite number", "nan"),
    (StepItem("a", 0, chunk()), "INVALID_ARGUMENT", "EPISODE_TWICE_IN_BATCH", "items[1].episode_id", "each episode once in a batch", "'a'"),
    (StepItem("broken", 0, chunk()), "DATA_LOSS", "NON_FINITE_OUTPUT", "items[1].frames", "finite pixels", "NaN or infinity"),
]  # fmt: skip


@pytest.mark.parametrize(("item", "code", "reason", "name", "expected", "got"), ERRORS, ids=[row[2] for row in ERRORS])
def test_a_bad_step_fails_alone_and_says_why(
    client: EnvironmentClient,
    backend: StubBackend,
    item: StepItem,
    code: str,
    reason: str,
    name: str,
    expected: str,
    got: str,
) -> None:
    backend.broken.add("broken")
    for episode in ("a", "b", "broken", "ended"):
        open_episode(client, episode)
    client.step([StepItem("b", 0, chunk())])
    for index in range(4):
        client.step([StepItem("ended", index, chunk())])
    backend.runs.clear()

    neighbour, bad = client.step([StepItem("a", 0, chunk()), item])

    assert not isinstance(neighbour, ItemError)
    assert neighbour.elapsed_steps == 50
    assert isinstance(bad, ItemError)
    assert (bad.code, bad.reason, bad.name, bad.expected, bad.got) == (code, reason, name, expected, got)
    assert bad.advice
    # The episode stands where it stood.
    [after] = client.step([StepItem("b", 1, chunk())])
    assert not isinstance(after, ItemError)
    assert after.elapsed_steps == 100


RESET_ERRORS = [
    (ResetItem("b", "adjust_bottle/train/9999"), "NOT_FOUND", "INITIAL_STATE_UNKNOWN", "items[1].initial_state_id", "'adjust_bottle/train/9999'"),
    (ResetItem("open", KNOWN_STATE, 4), "ALREADY_EXISTS", "EPISODE_EXISTS_WITH_OTHER_CONTENT", "items[1].seed", "4"),
    (ResetItem("no spaces", KNOWN_STATE), "INVALID_ARGUMENT", "EPISODE_ID_INVALID", "items[1].episode_id", "'no spaces'"),
    (ResetItem("", KNOWN_STATE), "INVALID_ARGUMENT", "EPISODE_ID_INVALID", "items[1].episode_id", "''"),
    (ResetItem("a", KNOWN_STATE), "INVALID_ARGUMENT", "EPISODE_TWICE_IN_BATCH", "items[1].episode_id", "'a'"),
]  # fmt: skip


@pytest.mark.parametrize(("item", "code", "reason", "name", "got"), RESET_ERRORS, ids=[row[2] for row in RESET_ERRORS])
def test_a_bad_reset_fails_alone_and_says_why(
    client: EnvironmentClient, item: ResetItem, code: str, reason: str, name: str, got: str
) -> None:
    open_episode(client, "open", seed=3)
    good, bad = client.reset([ResetItem("a", KNOWN_STATE), item])
    assert not isinstance(good, ItemError)
    assert isinstance(bad, ItemError)
    assert (bad.code, bad.reason, bad.name, bad.got) == (code, reason, name, got)


def test_beyond_capacity_the_error_says_when_to_come_again(client: EnvironmentClient) -> None:
    replies = client.reset([ResetItem(f"e{number}", KNOWN_STATE) for number in range(5)])
    assert [isinstance(reply, ItemError) for reply in replies] == [False] * 4 + [True]
    refused = replies[-1]
    assert isinstance(refused, ItemError)
    assert (refused.code, refused.reason, refused.expected) == (
        "RESOURCE_EXHAUSTED",
        "CAPACITY",
        "at most 4 open episodes",
    )
    assert refused.retry_after_s > 0
    client.close_episodes(["e0"])
    open_episode(client, "e4")


def test_another_interface_is_refused_with_the_fields_that_differ(server: RunningServer, backend: StubBackend) -> None:
    ours = dataclasses.replace(
        adjust_bottle_interface(),
        observation=Observation(camera="wrist"),
        termination=TerminationRule(success_ends_episode=True),
    )
    with EnvironmentClient(server.address, interface=ours) as stranger:
        [refused] = stranger.reset([ResetItem("a", KNOWN_STATE)])
    assert isinstance(refused, ItemError)
    assert (refused.code, refused.reason) == ("FAILED_PRECONDITION", "INTERFACE_MISMATCH")
    assert [str(difference) for difference in refused.differences] == [
        'observation.camera: expected "head", got "wrist"',
        "termination.success_ends_episode: expected false, got true",
    ]
    assert backend.resets == []


def test_another_provenance_is_refused_only_when_pinned(server: RunningServer, backend: StubBackend) -> None:
    right = fingerprint(backend.contract.provenance)
    for pin, refused in (("", False), (right, False), ("0" * 64, True)):
        with EnvironmentClient(server.address, pinned_provenance_fingerprint=pin) as client:
            [reply] = client.reset([ResetItem(f"pin-{pin[:4]}", KNOWN_STATE)])
            assert isinstance(reply, ItemError) is refused
            if isinstance(reply, ItemError):
                assert (reply.code, reply.reason, reply.expected) == (
                    "FAILED_PRECONDITION",
                    "PROVENANCE_MISMATCH",
                    right,
                )


def test_a_replay_is_the_episode_and_leaves_nothing_open(client: EnvironmentClient) -> None:
    good = ReplayItem("good", KNOWN_STATE, 3, np.concatenate([chunk()] * 4))
    half = ReplayItem("half", KNOWN_STATE, 3, np.concatenate([chunk()] * 4)[:120])
    outcomes = dict(client.replay([good, half, dataclasses.replace(good, episode_id="again")]))
    assert list(outcomes) == ["good", "half", "again"]
    first, again, refused = outcomes["good"], outcomes["again"], outcomes["half"]
    assert isinstance(first, ReplayOutcome) and isinstance(again, ReplayOutcome)
    assert (first.elapsed_steps, first.success, first.total_reward, first.clipped_count) == (200, True, 1.0, 0)
    assert first.frames_sha256 == again.frames_sha256
    assert isinstance(refused, ItemError)
    assert refused.reason == "WRONG_SHAPE"
    assert client.info().live == 0


def test_a_backend_that_raises_tells_the_client_nothing_of_its_insides(
    client: EnvironmentClient, backend: StubBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_episode(client)

    def explode(_: object) -> None:
        raise RuntimeError("secret path /etc/weights")

    monkeypatch.setattr(backend, "step", explode)
    [failed] = client.step([StepItem("a", 0, chunk())])
    assert isinstance(failed, ItemError)
    assert (failed.code, failed.reason) == ("INTERNAL", "INTERNAL")
    assert "secret" not in str(failed)
    monkeypatch.undo()
    [reply] = client.step([StepItem("a", 0, chunk())])
    assert not isinstance(reply, ItemError)


@pytest.mark.parametrize("shape", [(), (-1, 14), (2**40, 14), (50,) * 9])
def test_absurd_shapes_on_the_wire_are_refused(
    server: RunningServer, client: EnvironmentClient, shape: tuple[int, ...]
) -> None:
    open_episode(client)
    item = environment_pb2.StepItem(
        episode_id="a", actions=common_pb2.Array(dtype="float32", shape=shape, data=b"1234")
    )
    with grpc.insecure_channel(server.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        [result] = stub.Step(environment_pb2.StepRequest(items=[item]), timeout=10).results
        assert result.error.code == "INVALID_ARGUMENT"
        with pytest.raises(grpc.RpcError) as caught:
            stub.Step(environment_pb2.StepRequest(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_the_limit_is_a_truncation_where_the_contract_says_so() -> None:
    backend = StubBackend()
    rule = TerminationRule(limit_is="truncated")
    interface = dataclasses.replace(backend.contract.interface, termination=rule)
    backend.contract = dataclasses.replace(backend.contract, interface=interface)
    server = start_environment_server(backend, None, ServerSettings())
    try:
        with EnvironmentClient(server.address, interface=interface) as client:
            open_episode(client)
            replies = [client.step([StepItem("a", index, chunk())])[0] for index in range(4)]
    finally:
        server.stop(0)
    last = replies[-1]
    assert not isinstance(last, ItemError)
    assert (last.terminated, last.truncated, last.end_reason) == (False, True, "limit")


def test_episodes_that_nobody_names_make_room_when_their_lease_is_over(backend: StubBackend) -> None:
    engine = EnvironmentEngine(backend, None, ServerMetrics("simulator", "stub"), lease_s=1000)
    deadline = time.monotonic() + 60
    names = ["left", "kept", "third", "fourth"]
    raise_for_errors(engine.reset([ResetItem(name, KNOWN_STATE) for name in names], deadline))
    for name in names:
        episode = engine.episodes.get(name)
        assert episode is not None
        episode.used_at -= 2000
    raise_for_errors(engine.step([StepItem("kept", 0, chunk())], deadline))
    assert backend.closed == []  # nothing is taken while there is no need
    raise_for_errors(engine.reset([ResetItem("new", KNOWN_STATE)], deadline))
    assert sorted(backend.closed) == ["fourth", "left", "third"]
    gone, kept = engine.step([StepItem("left", 0, chunk()), StepItem("kept", 1, chunk())], deadline)
    assert isinstance(gone, ItemError)
    assert gone.reason == "EPISODE_UNKNOWN"
    assert not isinstance(kept, ItemError)
