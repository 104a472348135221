"""A server as the backend of RLinf's `WorldModelEnv`: `WorldModelBackend` of its issue #1511 and pull request #1518.

RLinf's environment keeps the episodes, the reward and the resets; the server draws the frames. One call carries all
environments of a worker, with pixels as they are (RLinf's own remote backend, #1567, sends lossy video, a call each).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worldserve.adapters.slots import EpisodeSlots
from worldserve.contract import Interface
from worldserve.messages import FrameSelection

SEEDS = ("per_session", "as_given")


class RemoteWorldModelBackend:
    """Frames for RLinf's world-model environment.

    A server starts episodes from its own sealed states only: `task_ids` index `initial_states`, and the first frame
    that RLinf shows for one must be the server's, within `frame_tolerance`. History is the server's own.

    Args:
        targets: HOST:PORT of servers, or one of them; slot i lives in server i modulo their number.
        num_envs: slots.
        initial_states: ids by task id.
        seeds: "per_session" draws a noise seed for each session from `seed` and the slot, "as_given" takes RLinf's,
            which are all 0: equal noise in every slot.
        seed: see `seeds`.
        frame_tolerance: largest mean absolute difference, in grey levels of 255, between RLinf's first frame and the
            server's. A lossless data set of the same size is within 1; resized or compressed frames need more, and two
            states may be a few apart. None accepts any.
        interface: what the caller was built for; None takes the first server's own.
        timeout_s: deadline of a call, retries included.

    Attributes:
        chunk: actions a `generate`.
        action_dim: numbers of an action.
        condition_frame_length: frames that RLinf hands over at the start; one is enough.
        image_size: (height, width).
    """

    condition_frame_length = 1

    def __init__(
        self,
        targets: str | Sequence[str],
        num_envs: int,
        initial_states: Sequence[str],
        *,
        seeds: str = "per_session",
        seed: int = 0,
        frame_tolerance: float | None = 1.0,
        interface: Interface | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if seeds not in SEEDS:
            raise ValueError(f"seeds: expected one of {', '.join(SEEDS)}; got {seeds!r}")
        self._slots = EpisodeSlots(targets, num_envs, initial_states, seed, interface=interface, timeout_s=timeout_s)
        self._seeds, self._tolerance = seeds, frame_tolerance
        observation = self._slots.interface.observation
        self.chunk, self.action_dim = (
            self._slots.interface.timing.chunk_actions,
            self._slots.interface.action_dimensions,
        )
        self.image_size = (observation.height, observation.width)

    def open_session(
        self,
        env_ids: Sequence[int],
        init_frames: Sequence[Sequence[Tensor]],
        init_actions: Tensor | None = None,
        task_ids: Sequence[Any] = (),
        seeds: Sequence[int] = (),
    ) -> None:
        """Starts a trajectory in each slot.

        Args:
            env_ids: slots.
            init_frames: by slot, frames (3, 1, height, width) in [-1, 1], the last of which is where it stands.
            init_actions: the actions that led there; unused, since a server's episode begins at its first frame.
            task_ids: by slot, an index of `initial_states`, or an id itself.
            seeds: by slot, a noise seed.

        Raises:
            ValueError: a task id of no state, or a first frame that is not the server's.
            ItemFailedError: the server refused one.
        """
        slots = [int(slot) for slot in env_ids]
        if not len(slots) == len(init_frames) == len(task_ids) == len(seeds):
            raise ValueError(
                f"open_session: expected one of each a slot; got {len(slots)} env_ids, {len(init_frames)} init_frames, "
                f"{len(task_ids)} task_ids and {len(seeds)} seeds"
            )
        starts = [
            (self._state_of(task), int(seed) if self._seeds == "as_given" else None)
            for task, seed in zip(task_ids, seeds, strict=True)
        ]
        replies = self._slots.reset(slots, starts)
        try:
            for frames, reply in zip(init_frames, replies, strict=True):
                self._check_start(frames[-1], reply.frame, reply.initial_state_id)
        except ValueError:
            self._slots.release(slots)
            raise

    def generate(self, env_ids: Sequence[int], actions: Tensor | np.ndarray[Any, Any], condition: Any = None) -> Tensor:
        """Draws a chunk in each slot.

        Args:
            env_ids: slots, each once.
            actions: (b, chunk, dimensions), in the contract's units.
            condition: what the first version of the protocol hands over again at each call; the server has it.

        Returns:
            float32 (b, 3, chunk, height, width) in [-1, 1].

        Raises:
            NoEpisodeError: a slot without a session, or one whose episode has reached the contract's limit.
        """
        values = actions.detach().cpu().numpy() if isinstance(actions, Tensor) else actions
        replies = self._slots.step([int(slot) for slot in env_ids], values, FrameSelection.every(1))
        frames = torch.from_numpy(np.stack([reply.frames for reply in replies]))
        return frames.permute(0, 4, 1, 2, 3).to(torch.float32) / 127.5 - 1.0

    def close_session(self, env_ids: Sequence[int]) -> None:
        """Ends the trajectories of these slots; slots without one are ignored."""
        self._slots.release([int(slot) for slot in env_ids])

    def offload(self) -> None:
        """Returns at once: the weights are the server's, and this process's devices hold none of them."""

    def onload(self) -> None:
        """Returns at once, as `offload`."""

    def close(self) -> None:
        """Closes the sessions and the channels."""
        self._slots.close()

    def _state_of(self, task: Any) -> str:
        if isinstance(task, str):
            return task
        index, states = int(task), self._slots.initial_states
        if not 0 <= index < len(states):
            raise ValueError(f"task_ids: expected indices 0..{len(states) - 1} of initial_states; got {index}")
        return states[index]

    def _check_start(self, theirs: Tensor, ours: np.ndarray[Any, Any], state: str) -> None:
        if self._tolerance is None:
            return
        shown = (theirs[:, 0].detach().cpu().to(torch.float32).numpy().transpose(1, 2, 0) + 1.0) * 127.5
        if shown.shape != ours.shape:
            raise ValueError(f"init_frames: expected frames of {ours.shape} (image_size); got {shown.shape}")
        apart = float(np.abs(shown - ours).mean())
        if not apart <= self._tolerance:
            raise ValueError(
                f"init_frames: expected the first frame of {state!r} within {self._tolerance:g} grey levels; got one "
                f"{apart:.1f} away. Are initial_states in the order of RLinf's data set, its colours RGB in [-1, 1]?"
            )
