"""Your own environment behind the contract: a finger on a line that should end at the state's goal.

python examples/own_environment.py 127.0.0.1:50061
"""

import sys
from collections.abc import Sequence

import numpy as np

from worldserve import contract as c
from worldserve.messages import BackendChunk, BackendStep, ItemError, ResetItem, ResetReply
from worldserve.serving import ServerSettings, errors, run_environment_server

GOALS = {f"reach/train/{number:04d}": float(goal) for number, goal in enumerate(np.linspace(-0.9, 0.9, 8))}
COLUMNS = np.linspace(-1, 1, 36)
INTERFACE = c.Interface(
    "reach", c.ActionLayout((c.ActionDimension("finger", "rad", -1.0, 1.0, 1.0, "left"),)), c.Timing(chunk_actions=2),
    c.Observation(height=36, width=36), c.FrameConvention(frames_per_episode=5),
    termination=c.TerminationRule(4), reward=c.RewardRule("ground_truth", first_frame=1, last_frame=4),
)  # fmt: skip


class Reach:
    """The finger jumps to each target; to stand within 0.2 rad of the goal is a success."""

    contract, capacity = c.Contract(INTERFACE, c.Provenance("simulator", "reach", "1")), 64

    def __init__(self) -> None:
        self._goals: dict[str, float] = {}

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:  # noqa: D102
        return [self._open(item) for item in items]

    def _open(self, item: ResetItem) -> ResetReply | ItemError:
        state = item.initial_state_id
        if state not in GOALS:
            return errors.initial_state_unknown("initial_state_id", state, f"one of {list(GOALS)}")
        self._goals[item.episode_id] = GOALS[state]
        start = np.zeros(1, np.float32)
        return ResetReply(item.episode_id, state, item.seed, draw(start, GOALS[state])[0], start, "reach the green line")

    def step(self, items: Sequence[BackendStep]) -> list[BackendChunk | ItemError]:  # noqa: D102
        return [self._run(item, item.actions[:, 0], self._goals[item.episode_id]) for item in items]

    def _run(self, item: BackendStep, fingers: np.ndarray, goal: float) -> BackendChunk:
        wanted = [index - item.first_action_index - 1 for index in item.frame_indices]
        return BackendChunk(draw(fingers[wanted], goal), bool(abs(fingers[-1] - goal) < 0.2))

    def close_episodes(self, episode_ids: Sequence[str]) -> None:  # noqa: D102
        for name in episode_ids:
            self._goals.pop(name, None)

    def shutdown(self) -> None: ...  # noqa: D102


def draw(fingers: np.ndarray, goal: float) -> np.ndarray:
    """Frames (n, 36, 36, 3): red where the finger stands, green at the goal."""
    frames = np.zeros((len(fingers), 36, 36, 3), np.uint8)
    for frame, finger in zip(frames, fingers):
        frame[:, abs(COLUMNS - finger).argmin(), 0] = frame[:, abs(COLUMNS - goal).argmin(), 1] = 255
    return frames


if __name__ == "__main__":
    sys.exit(run_environment_server("own-environment", lambda _: Reach(), "", ServerSettings(bind=sys.argv[1])))
