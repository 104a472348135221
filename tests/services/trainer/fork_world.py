"""A world that decides by where the tool is at the grasp, as a client and as a backend behind a real socket."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worldserve.contract import Contract, adjust_bottle
from worldserve.episodes import Episode
from worldserve.episodes.initial_states import split_shifted_id
from worldserve.kinematics import tool_centre
from worldserve.messages import (
    BackendChunk,
    BackendStep,
    FrameSelection,
    ItemError,
    ResetItem,
    ResetReply,
    StepItem,
    StepReply,
    Verdict,
)

GRASP_ACTION = 62
_JOINTS = np.array([0.3, 1.8, 1.6, 0.9, 0.2, 0.4])
START = np.array(([0.0] * 6 + [1.0]) * 2, np.float32)


def nominal(error_mm: float = 0.0) -> np.ndarray:
    """The right arm goes down, closes from action 60 to 70, goes up; its tool is `error_mm` off in x at the grasp."""
    actions = np.zeros((200, 14), np.float32)
    actions[:, [6, 13]] = 1.0
    down = np.interp(np.arange(200), [0, 60, 90, 150], [0, 1, 1, 0])
    actions[:, 7:13] = np.outer(down, _JOINTS + 1e-3 * error_mm * _step_x())
    actions[:, 13] = np.interp(np.arange(200), [57.5, 72.5], [1, 0])
    return actions


def _step_x() -> np.ndarray:
    """Joint changes that move the tool a metre along x, to first order."""
    jacobian = (tool_centre("right", _JOINTS + 1e-5 * np.eye(6)) - tool_centre("right", _JOINTS)).T / 1e-5
    return np.asarray(np.linalg.pinv(jacobian) @ [1.0, 0.0, 0.0])


_AIM = tool_centre("right", nominal()[GRASP_ACTION, 7:13])


def error_mm(actions: np.ndarray, initial_state_id: str) -> float:
    """How far the tool is off at the grasp. A shift of the state in x adds to the error in x; one in y changes nothing."""
    _, dx_um, _ = split_shifted_id(initial_state_id)
    offset = 1e3 * (tool_centre("right", actions[GRASP_ACTION, 7:13]) - _AIM)
    return float(np.hypot(offset[0] + 1e-3 * dx_um, offset[1]))


def succeeds(actions: np.ndarray, initial_state_id: str, limit_mm: float) -> bool:
    """Whether the gripper closed in time, near enough."""
    return error_mm(actions, initial_state_id) < limit_mm and bool(50 < np.argmax(actions[:, 13] < 0.2) < 76)


def episode(number: int, error_mm: float = 0.0, success: bool = True, state: str | None = None) -> Episode:
    """A recorded episode of that error; without frames."""
    actions = nominal(error_mm)
    return Episode(
        episode_id=f"rollouts/0/{number}",
        initial_state_id=state or f"adjust_bottle/validation/{number:04d}",
        seed=number,
        instruction="lift it",
        requested_actions=actions,
        executed_actions=actions,
        proprioception=np.concatenate([START[None], actions]),
        rewards=np.zeros(200, np.float32),
        success=success,
        policy_name="policy",
        policy_sha256="0" * 64,
        contract=adjust_bottle("simulator", "fork-world", {}),
    )


class ForkWorld:
    """A client of a world that succeeds within `limit_mm`; with `verdicts` it is a world model, without truth."""

    def __init__(self, limit_mm: float, verdicts: bool = False) -> None:
        self.limit_mm, self.verdicts = limit_mm, verdicts
        self.open_episodes: set[str] = set()
        self.states: list[str] = []
        self.runs = self.frames_drawn = 0
        self._state: dict[str, str] = {}
        self._actions: dict[str, list[np.ndarray]] = {}

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        replies: list[ResetReply | ItemError] = []
        for item in items:
            self.runs += 1
            self.states.append(item.initial_state_id)
            self.open_episodes.add(item.episode_id)
            self._state[item.episode_id], self._actions[item.episode_id] = item.initial_state_id, []
            frame = np.zeros((16, 16, 3), np.uint8)
            replies.append(ResetReply(item.episode_id, item.initial_state_id, item.seed, frame, START, "lift it"))
        return replies

    def step(self, items: Sequence[StepItem]) -> list[StepReply | ItemError]:
        return [self._step(item) for item in items]

    def _step(self, item: StepItem) -> StepReply:
        done = self._actions[item.episode_id]
        assert item.chunk_index == len(done)
        done.append(item.actions)
        last = len(done) == 4
        success = last and succeeds(np.concatenate(done), self._state[item.episode_id], self.limit_mm)
        indices = [] if item.frames == FrameSelection.none() else list(range(50 * len(done) - 49, 50 * len(done) + 1))
        self.frames_drawn += len(indices)
        return StepReply(
            episode_id=item.episode_id,
            committed_chunk_index=item.chunk_index,
            frames=np.zeros((len(indices), 16, 16, 3), np.uint8),
            frame_indices=np.array(indices, np.int32),
            executed_actions=item.actions,
            clipped_count=0,
            elapsed_steps=50 * len(done),
            rewards=np.zeros(50, np.float32),
            terminated=last,
            truncated=False,
            end_reason="limit" if last else "",
            success=None if self.verdicts else success,
            verdict=Verdict(success, 0.9 if success else 0.1, 60, 0.5) if self.verdicts and last else None,
            proprioception=item.actions[-1],
        )

    def close_episodes(self, episode_ids: Sequence[str]) -> None:
        self.open_episodes -= set(episode_ids)


class ForkBackend:
    """The same world as a `Backend`. Its frames are bright where it succeeds, so that a mean of pixels judges it."""

    def __init__(self, limit_mm: float, kind: str, facts: dict[str, str]) -> None:
        self.limit_mm, self.capacity = limit_mm, 64
        self._contract = adjust_bottle(kind, "fork-world", facts)
        self._state: dict[str, str] = {}
        self._actions: dict[str, list[np.ndarray]] = {}

    @property
    def contract(self) -> Contract:
        return self._contract

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        for item in items:
            self._state[item.episode_id], self._actions[item.episode_id] = item.initial_state_id, []
        frame = np.zeros((96, 128, 3), np.uint8)
        return [ResetReply(i.episode_id, i.initial_state_id, i.seed, frame, START, "lift it") for i in items]

    def step(self, items: Sequence[BackendStep]) -> list[BackendChunk | ItemError]:
        return [self._step(item) for item in items]

    def _step(self, item: BackendStep) -> BackendChunk:
        done = self._actions[item.episode_id]
        done[item.chunk_index :] = [item.actions]
        whole = len(done) == 4
        success = whole and succeeds(np.concatenate(done), self._state[item.episode_id], self.limit_mm)
        frames = np.full((len(item.frame_indices), 96, 128, 3), 240 if success else 10, np.uint8)
        return BackendChunk(frames, success if self._contract.provenance.kind == "simulator" else None)

    def close_episodes(self, episode_ids: Sequence[str]) -> None:
        for episode_id in episode_ids:
            self._state.pop(episode_id, None)

    def shutdown(self) -> None:
        pass
