"""The optimisation of a frame classifier: balanced batches, mined frames, rounds that can be resumed.

A round is a fixed number of optimiser steps. Between rounds the classifier reads every training frame, and two pools
are drawn anew: the failures' highest frames (hard negatives: near misses, a bottle lifted and dropped), and for every
success the highest of the frames that may show it (its peak is what decides the episode). All randomness follows from
(seed, round), so a run that was killed between two checkpoints repeats the lost round exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.reward_server.classifier import FrameClassifier
from services.reward_server.frame_cache import LabelledFrames
from services.reward_server.ghosts import draw_ghosts, smear
from services.reward_server.labels import NEGATIVE, POSITIVE, UNKNOWN

# Episodes scored at once while mining.
_MINING_BATCH = 256
# Below this a frame labelled positive is taken for a bottle that slipped in the meantime, and left out.
_DOUBTFUL = 0.05


@dataclass(frozen=True)
class TrainingSettings:
    """How a classifier is trained."""

    rounds: int = 6
    steps_per_round: int = 150
    batch: int = 96
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    hard_fraction: float = 0.5
    """Share of the negatives that comes from the pool of hard ones."""
    hard_pool: float = 0.05
    """Share of the failures' frames that the pool of hard negatives holds, the highest scored."""
    mined_positives: int = 4
    """Highest frames of each success that join the positives."""
    brightness: float = 0.1
    """Frames are scaled by 1 +- this, channel by channel, and shifted by as much of full scale."""
    noise: float = 0.02
    """Standard deviation of pixel noise, of full scale."""
    blur_probability: float = 0.25
    """Share of the frames blurred by a 2x2 average."""
    smear_probability: float = 0.35
    """Share of the frames smeared as a world model's codec smears: averages over 2 or 4 pixels, stretched back."""
    ghosts: int = 32
    """Mixtures of a success and a failure in a batch, beside its `batch` frames (see ghosts.py)."""


@dataclass(frozen=True)
class Pools:
    """Flat positions (episode * k + frame) to draw training frames from."""

    positives: NDArray[np.int64]
    negatives: NDArray[np.int64]
    hard_negatives: NDArray[np.int64]


def first_pools(data: LabelledFrames, episodes: NDArray[np.int64]) -> Pools:
    """Pools before anything was trained: the sure positives (or, where there are none, late frames of successes)."""
    k = data.labels.shape[1]
    flat = episodes[:, None] * k + np.arange(k)
    labels = data.labels[episodes]
    positives = flat[labels == POSITIVE]
    without = data.success[episodes] & ~(labels == POSITIVE).any(1)
    late = (labels == UNKNOWN) & without[:, None]
    late[:, : k * 3 // 4] = False  # the last quarter: where the bottle, once up, is held
    positives = np.concatenate([positives, flat[late]])
    negatives = flat[labels == NEGATIVE]
    if not len(positives) or not len(negatives):
        raise ValueError(
            f"data: expected frames of both classes; got {len(positives)} positives, {len(negatives)} negatives"
        )
    return Pools(positives, negatives, negatives)


def mined_pools(
    data: LabelledFrames,
    episodes: NDArray[np.int64],
    probabilities: NDArray[np.float32],
    settings: TrainingSettings,
) -> Pools:
    """Pools from the classifier's own probabilities float32 (len(episodes), k)."""
    k = data.labels.shape[1]
    flat = episodes[:, None] * k + np.arange(k)
    labels, success = data.labels[episodes], data.success[episodes]
    sure = flat[(labels == POSITIVE) & (probabilities >= _DOUBTFUL)]
    candidates = np.where((labels != NEGATIVE) & success[:, None], probabilities, -1.0)
    highest = np.argsort(-candidates, axis=1, kind="stable")[:, : settings.mined_positives]
    rows = np.repeat(np.arange(len(episodes)), highest.shape[1])
    mined = flat[rows, highest.ravel()][candidates[rows, highest.ravel()] >= 0.0]
    negative = labels == NEGATIVE
    negatives = flat[negative]
    count = max(1, math.ceil(settings.hard_pool * len(negatives)))
    order = np.argsort(-probabilities[negative], kind="stable")[:count]
    return Pools(np.concatenate([sure, mined]), negatives, negatives[order])


def draw_batch(pools: Pools, settings: TrainingSettings, generator: np.random.Generator) -> NDArray[np.int64]:
    """Positions (batch,), half positive, then half negative."""
    positives = settings.batch // 2
    hard = round((settings.batch - positives) * settings.hard_fraction)
    return np.concatenate(
        [
            generator.choice(pools.positives, positives),
            generator.choice(pools.hard_negatives, hard),
            generator.choice(pools.negatives, settings.batch - positives - hard),
        ]
    )


def augment(frames: torch.Tensor, settings: TrainingSettings, generator: torch.Generator) -> torch.Tensor:
    """Frames uint8 (n, h, w, 3) to float32 (n, 3, h, w) in -1..1 with other light, noise, blur and smear.

    Nothing is moved: the height of the bottle is the label.
    """
    values = frames.permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1.0
    count = len(values)
    blurred = torch.nn.functional.avg_pool2d(values, 2, stride=1, padding=1)[:, :, 1:, 1:]
    chosen = torch.rand((count, 1, 1, 1), generator=generator) < settings.blur_probability
    values = torch.where(chosen, blurred, values)
    kind = torch.rand((count, 1, 1, 1), generator=generator)
    strength = torch.rand((count, 1, 1, 1), generator=generator)
    smeared = torch.where(kind < settings.smear_probability / 2.0, smear(values, 2), smear(values, 4))
    values = torch.where(kind < settings.smear_probability, torch.lerp(values, smeared, strength), values)
    scale = 1.0 + settings.brightness * (2.0 * torch.rand((count, 3, 1, 1), generator=generator) - 1.0)
    shift = settings.brightness * (2.0 * torch.rand((count, 1, 1, 1), generator=generator) - 1.0)
    noise = 2.0 * settings.noise * torch.randn(values.shape, generator=generator)
    return (values * scale + shift + noise).clamp_(-1.0, 1.0)


def score(classifier: FrameClassifier, data: LabelledFrames, episodes: NDArray[np.int64]) -> NDArray[np.float32]:
    """Probabilities float32 (len(episodes), k) of the cached frames; for mining, not for figures."""
    classifier.eval()
    k = data.labels.shape[1]
    flat_frames = data.frames.reshape(-1, *data.frames.shape[2:])
    positions = (episodes[:, None] * k + np.arange(k)).ravel()
    probabilities = np.empty(len(positions), np.float32)
    with torch.inference_mode():
        for first in range(0, len(positions), _MINING_BATCH):
            part = np.array(flat_frames[positions[first : first + _MINING_BATCH]])
            probabilities[first : first + len(part)] = torch.sigmoid(classifier(torch.from_numpy(part))).numpy()
    return probabilities.reshape(len(episodes), k)


def train_round(
    classifier: FrameClassifier,
    optimizer: torch.optim.Optimizer,
    data: LabelledFrames,
    pools: Pools,
    failures: NDArray[np.int64],
    settings: TrainingSettings,
    seed: int,
    round_index: int,
) -> Iterator[float]:
    """Runs one round; yields the loss after each step. The learning rate falls over all rounds as a half cosine.

    `failures` are the failed episodes that ghosts are made with.
    """
    generator = np.random.default_rng([seed, round_index])
    noise = torch.Generator().manual_seed(int(generator.integers(2**62)))
    flat_frames = data.frames.reshape(-1, *data.frames.shape[2:])
    real_targets = (np.arange(settings.batch) < settings.batch // 2).astype(np.float32)
    total = settings.rounds * settings.steps_per_round
    classifier.train()
    for step in range(settings.steps_per_round):
        done = (round_index * settings.steps_per_round + step) / total
        optimizer.param_groups[0]["lr"] = settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
        real = flat_frames[draw_batch(pools, settings, generator)]
        ghosts = draw_ghosts(data, pools.positives, failures, settings.ghosts, generator)
        frames = torch.from_numpy(np.concatenate([real, ghosts.frames]))
        targets = torch.from_numpy(np.concatenate([real_targets, ghosts.targets]))
        logits = classifier.classify(augment(frames, settings, noise))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)
        if not bool(torch.isfinite(loss)):
            raise FloatingPointError(
                f"loss: expected a finite number; got {float(loss.detach())}; lower --learning-rate"
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(classifier.parameters(), 1.0)
        optimizer.step()
        yield float(loss.detach())


def train(
    classifier: FrameClassifier,
    optimizer: torch.optim.Optimizer,
    data: LabelledFrames,
    episodes: NDArray[np.int64],
    settings: TrainingSettings,
    seed: int,
    first_round: int = 0,
    stop_after_round: int | None = None,
    on_step: Callable[[], None] = lambda: None,
    on_round: Callable[[int, dict[str, float]], None] = lambda index, metrics: None,
) -> None:
    """Trains in place on `episodes` (positions in `data`), from `first_round` on; `on_round` gets a round's figures."""
    failures = episodes[~data.success[episodes]]
    for round_index in range(first_round, settings.rounds if stop_after_round is None else stop_after_round):
        if round_index == 0:
            pools = first_pools(data, episodes)
        else:
            pools = mined_pools(data, episodes, score(classifier, data, episodes), settings)
        losses = []
        for loss in train_round(classifier, optimizer, data, pools, failures, settings, seed, round_index):
            losses.append(loss)
            on_step()
        sizes = {"positives": len(pools.positives), "hard_negatives": len(pools.hard_negatives)}
        tail = losses[-50:]
        on_round(round_index, {"loss": float(np.mean(losses)), "loss_at_end": float(np.mean(tail)), **sizes})
