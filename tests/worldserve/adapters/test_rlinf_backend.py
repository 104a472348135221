"""RemoteWorldModelBackend: the calls that RLinf's WorldModelEnv makes, and what it would get wrong without an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from examples.own_environment import GOALS, draw
from tests.worldserve.adapters.conftest import STATES
from worldserve.serving import RunningServer

torch = pytest.importorskip("torch")

from worldserve.adapters.rlinf_backend import RemoteWorldModelBackend  # noqa: E402
from worldserve.adapters.slots import NoEpisodeError  # noqa: E402


@pytest.fixture
def backend(server: RunningServer) -> Iterator[RemoteWorldModelBackend]:
    made = RemoteWorldModelBackend(server.address, 3, STATES, timeout_s=20)
    yield made
    made.close()


def shown(state: str, finger: float = 0.0) -> Any:
    """A first frame as RLinf hands it over: (3, 1, height, width) in [-1, 1]."""
    frame = draw(np.array([finger]), GOALS[state])[0]
    return torch.from_numpy(frame).permute(2, 0, 1)[:, None].float() / 127.5 - 1


def open_all(backend: RemoteWorldModelBackend, slots: list[int], tasks: list[Any]) -> None:
    frames = [[shown(STATES[task])] for task in tasks]
    backend.open_session(slots, frames, torch.zeros(len(slots), 1, 1), tasks, [0] * len(slots))


def test_a_session_of_two_chunks(backend: RemoteWorldModelBackend) -> None:
    assert (backend.chunk, backend.condition_frame_length, backend.image_size) == (2, 1, (36, 36))
    open_all(backend, [0, 1, 2], [0, 1, 0])
    for _ in range(2):
        video = backend.generate([0, 1, 2], torch.tensor([0.1, 0.2, 0.3])[:, None, None].expand(3, 2, 1))
        assert (video.shape, video.dtype) == ((3, 3, 2, 36, 36), torch.float32)
        assert (video.min(), video.max()) == (-1, 1)
        expected = draw(np.array([0.2, 0.2], np.float32), GOALS[STATES[1]])
        np.testing.assert_array_equal(((video[1] + 1) * 127.5).permute(1, 2, 3, 0).numpy(), expected)
    backend.offload()
    backend.onload()
    with pytest.raises(NoEpisodeError):  # the contract's limit; RLinf's max_episode_steps should be the same
        backend.generate([0], torch.zeros(1, 2, 1))
    backend.close_session([0, 1])
    backend.close_session([0, 1, 2])


def test_a_slot_is_restarted_while_the_others_go_on(backend: RemoteWorldModelBackend) -> None:
    open_all(backend, [0, 1], [0, 0])
    backend.generate([0, 1], torch.zeros(2, 2, 1))
    backend.close_session([1])
    open_all(backend, [1], [1])
    backend.generate([1, 0], torch.zeros(2, 2, 1))
    with pytest.raises(NoEpisodeError, match=r"slots \[0\]"):
        backend.generate([0, 1], torch.zeros(2, 2, 1))


def test_a_first_frame_of_another_state_or_in_other_colours_is_refused(backend: RemoteWorldModelBackend) -> None:
    for frame in (shown(STATES[1]), shown(STATES[0]).flip(0), shown(STATES[0]) * 0.5 + 0.5):
        with pytest.raises(ValueError, match="init_frames: expected the first frame of 'reach/train/0006' within 1 "):
            backend.open_session([0], [[frame]], None, [0], [0])
    with pytest.raises(NoEpisodeError):
        backend.generate([0], torch.zeros(1, 2, 1))
    with pytest.raises(ValueError, match=r"task_ids: expected indices 0\.\.1 of initial_states; got 7"):
        backend.open_session([0], [[shown(STATES[0])]], None, [7], [0])


def test_seeds_are_drawn_for_each_session_unless_rlinfs_are_asked_for(server: RunningServer) -> None:
    def noise(seeds: str) -> list[int]:
        made = RemoteWorldModelBackend(server.address, 2, STATES, seeds=seeds)
        seen: list[int] = []
        reset = made._slots.reset

        def spy(*arguments: Any) -> Any:
            replies = reset(*arguments)
            seen.extend(reply.seed for reply in replies)
            return replies

        made._slots.reset = spy  # type: ignore[method-assign]
        open_all(made, [0, 1], [0, 0])
        open_all(made, [0], [0])
        made.close()
        return seen

    assert noise("as_given") == [0, 0, 0]
    assert len(set(noise("per_session"))) == 3
    assert noise("per_session") == noise("per_session")


def test_it_is_rlinfs_protocol(backend: RemoteWorldModelBackend) -> None:
    module = pytest.importorskip(
        "rlinf.envs.world_model.backend", reason="RLinf 0.3.0 has no WorldModelBackend yet (pull request #1518)"
    )
    assert isinstance(backend, module.WorldModelBackend)
