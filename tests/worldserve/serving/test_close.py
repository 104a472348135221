"""An id is free once the backend is done with its episode, and a backend's fault is its episodes' alone."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.worldserve.serving.conftest import KNOWN_STATE, StubBackend, chunk
from worldserve.messages import BackendChunk, BackendStep, ItemError, ResetItem, ResetReply, StepItem, StepReply
from worldserve.serving.engine import EnvironmentEngine
from worldserve.serving.metrics import ServerMetrics

LEASE_S = 1000.0


@pytest.fixture
def engine(backend: StubBackend) -> EnvironmentEngine:
    return EnvironmentEngine(backend, None, ServerMetrics("simulator", "stub"), LEASE_S)


def reset(engine: EnvironmentEngine, name: str, patience_s: float = 20.0) -> str:
    """The reason of the error, "" where there is none."""
    [reply] = engine.reset([ResetItem(name, KNOWN_STATE)], time.monotonic() + patience_s)
    return reply.reason if isinstance(reply, ItemError) else ""


def step(engine: EnvironmentEngine, name: str, index: int = 0) -> StepReply | ItemError:
    [reply] = engine.step([StepItem(name, index, chunk())], time.monotonic() + 20)
    return reply


def while_closing(backend: StubBackend, action: Callable[[], str]) -> list[str]:
    """Runs `action` each time while the backend frees episodes; what it returned, for later."""
    seen: list[str] = []

    def close_episodes(episode_ids: Sequence[str]) -> None:
        seen.append(action())
        backend.closed += episode_ids

    backend.close_episodes = close_episodes  # type: ignore[method-assign]
    return seen


def test_an_id_is_taken_until_its_close_is_done(engine: EnvironmentEngine, backend: StubBackend) -> None:
    assert reset(engine, "a") == ""
    seen = while_closing(backend, lambda: reset(engine, "a", patience_s=0.0))
    assert engine.close(["a"]) == 1
    assert seen == ["EPISODE_BUSY"]
    assert reset(engine, "a") == ""
    assert backend.resets == ["a", "a"]


def test_an_id_whose_lease_is_over_is_taken_until_its_close_is_done(
    engine: EnvironmentEngine, backend: StubBackend
) -> None:
    names = [f"e{number}" for number in range(backend.capacity)]
    for name in names:
        assert reset(engine, name) == ""
        episode = engine.episodes.get(name)
        assert episode is not None
        episode.used_at -= 2 * LEASE_S
    seen = while_closing(backend, lambda: reset(engine, "e0", patience_s=0.0))
    assert reset(engine, "new") == ""
    assert seen == ["EPISODE_BUSY"]
    assert sorted(backend.closed) == names
    assert reset(engine, "e0") == ""


def test_an_id_that_opened_badly_is_taken_until_it_is_freed(engine: EnvironmentEngine, backend: StubBackend) -> None:
    honest = backend.reset

    def unfinite(items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        [reply] = honest(items)
        assert isinstance(reply, ResetReply)
        return [dataclasses.replace(reply, proprioception=np.full(14, np.nan, np.float32))]

    backend.reset = unfinite  # type: ignore[method-assign]
    seen = while_closing(backend, lambda: reset(engine, "a", patience_s=0.0))
    assert reset(engine, "a") == "NON_FINITE_OUTPUT"
    assert seen == ["EPISODE_BUSY"]
    backend.reset = honest  # type: ignore[method-assign]
    assert reset(engine, "a") == ""


def test_a_close_that_fails_gives_the_id_free(
    engine: EnvironmentEngine, backend: StubBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(episode_ids: Sequence[str]) -> None:
        raise OSError("the pipe is gone")

    assert reset(engine, "a") == ""
    with monkeypatch.context() as patch:
        patch.setattr(backend, "close_episodes", fail)
        with pytest.raises(OSError, match="pipe"):
            engine.close(["a"])
    assert reset(engine, "a") == ""
    assert engine.close(["a", "a", "never"]) == 1


def test_a_close_that_waited_does_not_take_the_next_episode_of_that_id(
    engine: EnvironmentEngine, backend: StubBackend
) -> None:
    assert reset(engine, "a") == ""
    old = engine.episodes.get("a")
    assert old is not None
    assert engine.close(["a"]) == 1
    assert reset(engine, "a") == ""
    assert engine.episodes.begin_close({"a": old}) == []
    assert isinstance(step(engine, "a"), StepReply)


@pytest.mark.parametrize(
    "error", [BrokenPipeError("worker"), ConnectionResetError("worker"), EOFError(), TimeoutError()]
)
def test_a_backends_connection_error_is_a_fault_like_any_other(
    engine: EnvironmentEngine, backend: StubBackend, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(items: Sequence[object]) -> list[BackendChunk | ItemError]:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(backend, "reset", fail)
        assert reset(engine, "a") == "INTERNAL"
    assert reset(engine, "a") == ""
    with monkeypatch.context() as patch:
        patch.setattr(backend, "step", fail)
        failed = step(engine, "a")
    assert isinstance(failed, ItemError)
    assert (failed.code, failed.name) == ("INTERNAL", "items[0].backend")
    reply = step(engine, "a")
    assert isinstance(reply, StepReply)
    assert reply.elapsed_steps == 50


def test_what_a_backend_ran_before_another_item_failed_is_committed(
    engine: EnvironmentEngine, backend: StubBackend
) -> None:
    for name in ("a", "b"):
        assert reset(engine, name) == ""
    honest = backend.step

    def lose_b(items: Sequence[BackendStep]) -> list[BackendChunk | ItemError]:
        return [*honest(items[:1]), ItemError("INTERNAL", "INTERNAL", "step", "an outcome", "a lost worker", "")]

    backend.step = lose_b  # type: ignore[method-assign]
    deadline = time.monotonic() + 20
    done, lost = engine.step([StepItem("a", 0, chunk()), StepItem("b", 0, chunk())], deadline)
    assert isinstance(done, StepReply)
    assert isinstance(lost, ItemError)
    backend.step = honest  # type: ignore[method-assign]
    again, new = engine.step([StepItem("a", 0, chunk()), StepItem("b", 0, chunk())], deadline)
    assert isinstance(again, StepReply) and isinstance(new, StepReply)
    assert backend.runs == [("a", 0), ("b", 0)]
