"""Your own environment behind the contract: a finger on a line that should end at the state's goal.

python -m examples.own_environment 127.0.0.1:50061
"""

import sys

import numpy as np

from worldserve import contract as c
from worldserve.messages import BackendChunk, ResetReply
from worldserve.serving import ServerSettings, errors, run_environment_server

GOALS = {f"reach/train/{number:04d}": float(goal) for number, goal in enumerate(np.linspace(-0.9, 0.9, 8))}
COLUMNS = np.linspace(-1, 1, 36)
ACTION = c.ActionLayout((c.ActionDimension("finger", "rad", low=-1.0, high=1.0, max_change=1.0, arm="left"),))
TIMING, LIMIT = c.Timing(chunk_actions=2), c.TerminationRule(limit_actions=4)
SEEN, FRAMES = c.Observation(height=36, width=36), c.FrameConvention(frames_per_episode=5)
REWARD = c.RewardRule("ground_truth", first_frame=1, last_frame=4)
INTERFACE = c.Interface("reach", ACTION, TIMING, SEEN, FRAMES, termination=LIMIT, reward=REWARD)


class Reach:
    """The finger jumps to each target; to stand within 0.2 rad of the goal is a success."""

    contract, capacity, goals = c.Contract(INTERFACE, c.Provenance("simulator", "reach", "1")), 64, {}

    def reset(self, items):  # a list of replies or errors, in the order of the items
        return [self.open(item.episode_id, item.initial_state_id, item.seed) for item in items]

    def open(self, episode_id, state, seed):
        if state not in GOALS:
            return errors.initial_state_unknown("initial_state_id", state, f"one of {list(GOALS)}")
        start, self.goals = np.zeros(1, np.float32), {**self.goals, episode_id: GOALS[state]}
        return ResetReply(episode_id, state, seed, draw(start, GOALS[state])[0], start, "reach the green line")

    def step(self, items):  # the engine has checked the actions, clipped them and kept their order
        return [self.run(item, item.actions[:, 0], self.goals[item.episode_id]) for item in items]

    def run(self, item, fingers, goal):
        wanted = [index - item.first_action_index - 1 for index in item.frame_indices]
        return BackendChunk(draw(fingers[wanted], goal), success=bool(abs(fingers[-1] - goal) < 0.2))

    def close_episodes(self, episode_ids):
        self.goals = {name: goal for name, goal in self.goals.items() if name not in episode_ids}

    def shutdown(self): ...


def draw(fingers, goal):
    """Frames uint8 (n, 36, 36, 3): red where the finger stands, green at the goal."""
    frames = np.zeros((len(fingers), 36, 36, 3), np.uint8)
    for frame, finger in zip(frames, fingers):
        frame[:, abs(COLUMNS - finger).argmin(), 0] = frame[:, abs(COLUMNS - goal).argmin(), 1] = 255
    return frames


if __name__ == "__main__":
    sys.exit(run_environment_server("reach", lambda _: Reach(), "", ServerSettings(bind=sys.argv[1])))
