"""Your own world model behind the contract: any function from (frame, actions, noise) to the next frames.

python -m examples.own_world_model 127.0.0.1:50062
"""

import sys

import numpy as np

from examples.own_environment import COLUMNS, GOALS, INTERFACE, draw
from worldserve import contract as c
from worldserve.messages import BackendChunk, ResetReply
from worldserve.serving import ServerSettings, errors, run_environment_server


def predict(frame, actions, noise):
    """The model, uint8 (36, 36, 3) and float32 (n, 1) to uint8 (n, 36, 36, 3): this one draws a little too dark."""
    drawn = draw(actions[:, 0], COLUMNS[frame[0, :, 1].argmax()])
    return (drawn * noise.uniform(0.8, 1.0, (len(actions), 1, 1, 1))).astype(np.uint8)


class OwnWorldModel:
    """Keeps each episode's seed and frames. It knows no ground truth: start it with a reward server that judges."""

    contract = c.Contract(INTERFACE, c.Provenance("world_model", "own", "1", {"weights_sha256": "your weights' hash"}))
    capacity, episodes = 1024, {}

    def reset(self, items):  # a list of replies or errors, in the order of the items
        return [self.open(item.episode_id, item.initial_state_id, item.seed) for item in items]

    def open(self, episode_id, state, seed):
        if state not in GOALS:
            return errors.initial_state_unknown("initial_state_id", state, f"one of {list(GOALS)}")
        start = np.zeros(1, np.float32)
        frame = draw(start, GOALS[state])[0]
        self.episodes = {**self.episodes, episode_id: (seed, {0: frame})}
        return ResetReply(episode_id, state, seed, frame, start, "reach the green line")

    def step(self, items):
        return [self.run(item, *self.episodes[item.episode_id]) for item in items]

    def run(self, item, seed, frames):
        # Noise is of the seed and the chunk's number alone, so that a retry or another batch gives the same bytes.
        noise, first = np.random.default_rng([seed, item.chunk_index]), item.first_action_index
        drawn = predict(frames[first], item.actions, noise)
        frames.update({first + 1 + offset: frame for offset, frame in enumerate(drawn)})
        return BackendChunk(drawn[[index - first - 1 for index in item.frame_indices]], success=None)

    def close_episodes(self, episode_ids):
        self.episodes = {name: kept for name, kept in self.episodes.items() if name not in episode_ids}

    def shutdown(self): ...


if __name__ == "__main__":
    sys.exit(run_environment_server("own", lambda _: OwnWorldModel(), "", ServerSettings(bind=sys.argv[1])))
