"""A small world with the real arms' kinematics: what the probes, the conformance suite and examples are tried on.

Two X5 arms follow their targets with a lag, a bottle can be grasped and lifted, and a pinhole camera draws points. It
is exact, has no dependencies beyond numpy, and an episode costs milliseconds. As a world model it adds noise to its
frames, a function of (seed, chunk index), and tells no success.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from worldserve.contract import Contract, Interface, Observation, RewardRule, adjust_bottle, adjust_bottle_interface
from worldserve.kinematics import ARMS, TOOL_CENTRE_M, arm_link_frames
from worldserve.messages import (
    BackendChunk,
    BackendStep,
    ItemError,
    ResetItem,
    ResetReply,
    ScoreItem,
    ScoreReply,
    Verdict,
)
from worldserve.serving import errors

HEIGHT, WIDTH = 48, 64
# Share of the way to its target that a joint goes in one action.
FOLLOW = 0.7
GRASP_M, CLOSED_BELOW, LIFTED_Z_M = 0.06, 0.4, 0.9
NOISE_LEVELS = 4
# Targets of the right arm (radians): at the bottle, and lifted.
GRASP_RAD = (0.586, 2.101, 1.386, -0.855, 0.002, -1.117)
LIFTED_RAD = (0.614, 0.931, 0.464, 0.458, 0.630, 0.016)
_EYE, _LOOK_AT, _FIELD_OF_VIEW_RAD = (0.0, -0.80, 1.42), (0.0, -0.10, 0.935), math.radians(36.0)
_SKY, _TABLE, _BOTTLE = (150, 160, 170), (205, 195, 180), (200, 40, 40)
_LINKS = np.array([(60, 60, 70), (40, 70, 130), (60, 90, 150), (80, 110, 170), (40, 60, 110), (30, 40, 90)], np.uint8)
_FINGERS = (220, 170, 30)


def probe_world_interface() -> Interface:
    """The default task's interface with frames of 48x64, of which the verdict reads the last ten."""
    return dataclasses.replace(
        adjust_bottle_interface(),
        observation=Observation(height=HEIGHT, width=WIDTH),
        reward=RewardRule(first_frame=191, last_frame=200),
    )


def success_actions() -> NDArray[np.float32]:
    """Actions that lift the bottle in every state of this world, float32 (200, 14)."""
    home = np.zeros(14)
    home[[6, 13]] = 1.0
    grasp, closed, lifted = home.copy(), home.copy(), home.copy()
    grasp[7:13] = closed[7:13] = GRASP_RAD
    lifted[7:13], closed[13], lifted[13] = LIFTED_RAD, 0.0, 0.0
    keyframes = ((home, grasp, 62), (grasp, closed, 18), (closed, lifted, 60), (lifted, lifted, 60))
    rows = [a + (b - a) * k / count for a, b, count in keyframes for k in range(1, count + 1)]
    return np.array(rows, np.float32)


@dataclass
class _Episode:
    item: ResetItem
    joints: NDArray[np.float64]
    bottle: NDArray[np.float64]
    held: bool = False
    success: bool = False


@dataclass
class ProbeWorld:
    """A `Backend`. `kind` is "simulator" or "world_model"; states are "probe/state/0000" to 0099."""

    kind: str = "simulator"
    capacity: int = 64
    judged: bool = False
    contract: Contract = field(init=False)

    def __post_init__(self) -> None:
        judge = "reward_model" if self.judged else ("ground_truth" if self.kind == "simulator" else "none")
        found = adjust_bottle(self.kind, "probe-world", {"judge": judge})
        self.contract = dataclasses.replace(found, interface=probe_world_interface())
        self._episodes: dict[str, _Episode] = {}

    def reset(self, items: Sequence[ResetItem]) -> list[ResetReply | ItemError]:
        """Opens episodes."""
        return [self._opened(item) for item in items]

    def _opened(self, item: ResetItem) -> ResetReply | ItemError:
        number = item.initial_state_id.removeprefix("probe/state/")
        if len(number) != 4 or not number.isdecimal() or int(number) > 99:
            known = "probe/state/0000 to probe/state/0099"
            return errors.initial_state_unknown("initial_state_id", item.initial_state_id, known)
        home = np.zeros(14)
        home[[6, 13]] = 1.0
        episode = _Episode(item, home, _bottle_of(int(number)))
        self._episodes[item.episode_id] = episode
        frame = _draw(episode.joints[None], episode.bottle[None])[0]
        return ResetReply(
            item.episode_id, item.initial_state_id, item.seed, frame, home.astype(np.float32), "Lift the bottle."
        )

    def step(self, items: Sequence[BackendStep]) -> list[BackendChunk | ItemError]:
        """Runs chunks."""
        return [self._stepped(item) for item in items]

    def _stepped(self, item: BackendStep) -> BackendChunk | ItemError:
        episode = self._episodes.get(item.episode_id)
        if episode is None:
            return errors.episode_unknown("episode_id", item.episode_id)
        joints, bottles = self._run(episode, item.actions)
        rows = [index - item.first_action_index - 1 for index in item.frame_indices]
        if not rows:
            return BackendChunk(np.zeros((0, HEIGHT, WIDTH, 3), np.uint8), self._known(episode))
        frames = _draw(joints[rows], bottles[rows])
        if self.kind == "world_model":
            noise = np.random.default_rng([episode.item.seed, item.chunk_index]).integers(
                0, NOISE_LEVELS, (len(item.actions), HEIGHT, WIDTH, 1), np.uint8
            )
            frames = frames + noise[rows]
        return BackendChunk(frames, self._known(episode))

    def _known(self, episode: _Episode) -> bool | None:
        return episode.success if self.kind == "simulator" else None

    def _run(self, episode: _Episode, actions: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Joints and bottle after each action."""
        joints = np.empty((len(actions), 14))
        present = episode.joints
        for row, action in enumerate(actions):
            present = present + FOLLOW * (action - present)
            joints[row] = present
        episode.joints = present
        tools = {arm: _tools(arm, joints) for arm in ARMS}
        bottles = np.empty((len(actions), 3))
        for row in range(len(actions)):
            episode.held = False
            for arm, gripper in (("left", 6), ("right", 13)):
                near = float(np.linalg.norm(tools[arm][row] - episode.bottle)) < GRASP_M
                if joints[row, gripper] < CLOSED_BELOW and near:
                    episode.bottle, episode.held = tools[arm][row], True
            if not episode.held:
                episode.bottle = np.array([*episode.bottle[:2], min(episode.bottle[2], 0.765)])
            episode.success = episode.success or bool(episode.bottle[2] > LIFTED_Z_M)
            bottles[row] = episode.bottle
        return joints, bottles

    def close_episodes(self, episode_ids: Sequence[str]) -> None:
        """Frees episodes."""
        for name in episode_ids:
            self._episodes.pop(name, None)

    def shutdown(self) -> None:
        """Frees everything."""
        self._episodes.clear()


@dataclass
class ProbeJudge:
    """A `Judge` of that world: a frame with the bottle above the table's edge is a success."""

    threshold: float = 0.5

    def check(self, interface: Interface) -> None:
        """Every interface will do."""

    def score(self, items: Sequence[ScoreItem]) -> list[ScoreReply | ItemError]:
        """Scores clips."""
        return [self._scored(item) for item in items]

    def _scored(self, item: ScoreItem) -> ScoreReply:
        upper = item.frames[:, : HEIGHT * 2 // 5].astype(np.int16)
        red = (upper[..., 0] - upper[..., 2] > 100) & (upper[..., 1] < 80)
        probabilities = np.minimum(1.0, red.sum((1, 2)) / 6).astype(np.float32)
        peak, at = item.carried_peak, item.carried_peak_frame_index
        if len(probabilities) and float(probabilities.max()) > peak:
            best = int(probabilities.argmax())
            peak, at = float(probabilities[best]), int(item.frame_indices[best])
        verdict = Verdict(peak >= self.threshold, peak, at, self.threshold)
        return ScoreReply(item.episode_id, probabilities, item.frame_indices, verdict)


def _bottle_of(number: int) -> NDArray[np.float64]:
    """Where a state's bottle lies: within the grasp's reach of one place, different for each number."""
    tool = _tools("right", np.array([[0.0] * 7 + list(GRASP_RAD) + [1.0]]))[0]
    shift = np.random.default_rng([number, 7]).uniform(-0.025, 0.025, 2)
    return np.array([tool[0] + shift[0], tool[1] + shift[1], 0.765])


def _tools(arm: str, joints: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where the fingers hold, (n, 3)."""
    start = 7 * ARMS.index(arm)
    link = arm_link_frames(arm, joints[:, start : start + 6])[:, -1]
    return link[:, :3, 3] + TOOL_CENTRE_M * link[:, :3, 0]


def _draw(joints: NDArray[np.float64], bottles: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Frames uint8 (n, 48, 64, 3) of joints (n, 14) and bottle positions (n, 3)."""
    frames = np.empty((len(joints), HEIGHT, WIDTH, 3), np.uint8)
    frames[:, : HEIGHT * 2 // 5], frames[:, HEIGHT * 2 // 5 :] = _SKY, _TABLE
    along = np.linspace(-0.05, 0.05, 7)
    body = bottles[:, None] + np.stack([along, 0 * along, 0.15 * along], -1)
    _paint(frames, body, np.array([_BOTTLE], np.uint8), 1)
    for arm in ARMS:
        start = 7 * ARMS.index(arm)
        links = arm_link_frames(arm, joints[:, start : start + 6])
        origins = links[..., :3, 3]
        share = np.linspace(0.0, 1.0, 9)[:, None]
        for number in range(6):
            points = origins[:, number, None] + share * (origins[:, number + 1] - origins[:, number])[:, None]
            _paint(frames, points, _LINKS[number : number + 1], 1)
        hand, rotation = origins[:, 6], links[:, 6, :3, :3]
        opening = 0.012 + 0.045 * joints[:, start + 6]
        for side in (-1.0, 1.0):
            root = hand + side * opening[:, None] * rotation[..., 1]
            points = root[:, None] + share * (TOOL_CENTRE_M * rotation[..., 0])[:, None]
            _paint(frames, points, np.array([_FINGERS], np.uint8), 0)
    return frames


def _paint(frames: NDArray[np.uint8], points_m: NDArray[np.float64], colour: NDArray[np.uint8], radius_px: int) -> None:
    """Squares around world points (n, k, 3); what lies outside the picture is left out."""
    forward = np.subtract(_LOOK_AT, _EYE)
    forward = forward / np.linalg.norm(forward)
    left = np.cross((0.0, 0.0, 1.0), forward)
    left = left / np.linalg.norm(left)
    local = (points_m - np.asarray(_EYE)) @ np.column_stack([forward, left, np.cross(forward, left)])
    depth = np.maximum(local[..., 0], 0.05)
    focal_px = 0.5 * HEIGHT / math.tan(0.5 * _FIELD_OF_VIEW_RAD)
    columns = np.round(0.5 * WIDTH - focal_px * local[..., 1] / depth).astype(int)
    rows = np.round(0.5 * HEIGHT - focal_px * local[..., 2] / depth).astype(int)
    number = np.broadcast_to(np.arange(len(frames))[:, None], rows.shape)
    for down in range(-radius_px, radius_px + 1):
        for right in range(-radius_px, radius_px + 1):
            row, column = rows + down, columns + right
            seen = (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH) & (local[..., 0] > 0.05)
            frames[number[seen], row[seen], column[seen]] = colour[0]
