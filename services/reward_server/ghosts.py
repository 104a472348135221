"""Half-faded bottles, as a world model draws them where it cannot decide: made from two simulator frames.

A world model that is unsure of a grasp draws a mean of both outcomes: the bottle fades on the table and a faint one
hangs in the gripper. A classifier that has seen only real frames reads such ghosts as success (the study's fake
success). So training mixes a frame that shows success with the most similar frame of the same moment of failed
episodes, and labels the mixture by how much of the success is left: mostly faded is no success. Between the two
limits the class is open, and such frames are not trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.reward_server.frame_cache import LabelledFrames
from services.reward_server.scorer import Scorer

# Shares of the success frame: at most this is a failure, at least that a success.
FADED, SOLID = 0.55, 0.8
# Failed episodes among which the most similar frame is sought.
CANDIDATES = 12
# Shares and smears at which a fitted model is looked at.
REPORTED_SHARES = (0.25, 0.4, 0.5, 0.65, 0.8, 1.0)
REPORTED_SMEARS = (2, 4)
# Frames are compared at every so many-th pixel.
_COMPARED = 4


@dataclass(frozen=True)
class Ghosts:
    """Mixtures: `frames` uint8 (n, height, width, 3) and `targets` float32 (n,), 0 or 1."""

    frames: NDArray[np.uint8]
    targets: NDArray[np.float32]


def nearest_failures(
    data: LabelledFrames, positions: NDArray[np.int64], failures: NDArray[np.int64], generator: np.random.Generator
) -> NDArray[np.int64]:
    """For flat `positions` (episode * k + frame), those of similar frames of the same moment in `failures` (episodes).

    Usually the same arm in the same pose, without the bottle.
    """
    k = data.labels.shape[1]
    flat = data.frames.reshape(-1, *data.frames.shape[2:])
    drawn = generator.choice(failures, (len(positions), CANDIDATES))
    nearest = np.empty(len(positions), np.int64)
    for row, position in enumerate(positions):
        candidates = drawn[row] * k + position % k
        own = flat[position, ::_COMPARED, ::_COMPARED].astype(np.int16)
        others = flat[candidates][:, ::_COMPARED, ::_COMPARED].astype(np.int16)
        nearest[row] = candidates[np.abs(others - own).sum((1, 2, 3)).argmin()]
    return nearest


def mix(success: NDArray[np.uint8], failure: NDArray[np.uint8], share: NDArray[np.float64]) -> NDArray[np.uint8]:
    """share * success + (1 - share) * failure, rounded: frames uint8 (n, height, width, 3), share (n,) in [0, 1]."""
    weight = np.asarray(share, np.float32)[:, None, None, None]
    return np.rint(success * weight + failure * (1.0 - weight)).astype(np.uint8)


def draw_ghosts(
    data: LabelledFrames,
    positives: NDArray[np.int64],
    failures: NDArray[np.int64],
    count: int,
    generator: np.random.Generator,
) -> Ghosts:
    """`count` mixtures of frames drawn from flat `positives` with frames of `failures`, half faded, half solid."""
    chosen = generator.choice(positives, count)
    nearest = nearest_failures(data, chosen, failures, generator)
    solid = np.arange(count) % 2 == 1
    share = np.where(solid, generator.uniform(SOLID, 1.0, count), generator.uniform(0.1, FADED, count))
    flat = data.frames.reshape(-1, *data.frames.shape[2:])
    return Ghosts(mix(flat[chosen], flat[nearest], share), solid.astype(np.float32))


def smear(values: torch.Tensor, factor: int) -> torch.Tensor:
    """Float32 (n, channels, height, width) averaged over factor x factor pixels and stretched back: a coarse codec."""
    small = torch.nn.functional.avg_pool2d(values, factor)
    return torch.nn.functional.interpolate(small, size=values.shape[2:], mode="bilinear", align_corners=False)


def read_as_success(scorer: Scorer, data: LabelledFrames, episodes: NDArray[np.int64], seed: int) -> dict[str, float]:
    """Shares of ghosts and of smeared successes whose probability reaches the threshold.

    Made from the last frame of each success among `episodes` (positions in `data`) that passes as it is. "share_0.5":
    half of it is left, the rest is a failure; the lower the better below FADED. "smear_4": averaged over 4 pixels.
    """
    k = data.labels.shape[1]
    flat = data.frames.reshape(-1, *data.frames.shape[2:])
    successes, failures = episodes[data.success[episodes]], episodes[~data.success[episodes]]
    passing = []
    for episode in successes:
        reached = np.flatnonzero(scorer.probabilities(np.array(data.frames[episode])) >= scorer.threshold)
        if len(reached):
            passing.append(int(episode) * k + int(reached[-1]))
    if not passing or not len(failures):
        return {}
    positions = np.array(passing, np.int64)
    nearest = nearest_failures(data, positions, failures, np.random.default_rng([seed, 1]))
    frames, others = flat[positions], flat[nearest]

    def share_read(shown: NDArray[np.uint8]) -> float:
        return round(float((scorer.probabilities(shown) >= scorer.threshold).mean()), 4)

    rates = {
        f"share_{share:g}": share_read(mix(frames, others, np.full(len(frames), share))) for share in REPORTED_SHARES
    }
    values = torch.from_numpy(frames).permute(0, 3, 1, 2).to(torch.float32)
    for factor in REPORTED_SMEARS:
        smeared = smear(values, factor).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
        rates[f"smear_{factor}"] = share_read(smeared)
    return rates
