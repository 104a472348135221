"""Trains the transformer on encoded windows: flow matching on the future latents alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.wm_server import checkpoint
from services.wm_server.codec import to_float
from services.wm_server.codec_training import learning_rate_factor
from services.wm_server.dataset import FUTURE_LATENTS, Batch, LatentWindows
from services.wm_server.sampler import noised
from services.wm_server.transformer import BwmTransformer, TransformerConfig
from services.wm_server.windows import CONDITION_LATENTS, LATENT_FRAMES


@dataclass(frozen=True)
class TransformerTrainingConfig:
    """Settings of the transformer's training."""

    model: TransformerConfig = field(default_factory=TransformerConfig)
    """Size and wiring."""
    steps: int = 4000
    """Optimiser steps."""
    batch_size: int = 16
    """Windows a step."""
    learning_rate: float = 2e-3
    """Peak; 50 steps of warm-up, then a cosine down to a fiftieth."""
    weight_decay: float = 1e-2
    """AdamW's."""
    ema_decay: float = 0.998
    """Of the averaged weights, which are the ones kept."""
    gradient_clip: float = 1.0
    """Largest norm of the gradient."""
    history_noise: float = 0.05
    """Noise level of the history latents; the anchor stays clean. Serving uses the same."""
    pure_noise_fraction: float = 0.6
    """Share of windows trained at noise level 1, the level that few-step sampling lives on."""
    shift: float = 5.0
    """Of the noise levels of the others: sigma = shift u / (1 + (shift - 1) u), u uniform."""
    start_weights: tuple[tuple[int, float], ...] = ((0, 0.15), (50, 0.45), (100, 0.25), (150, 0.15), (-1, 0.0))
    """Share of windows by their start frame; -1 stands for random starts."""
    failure_fraction: float | None = 0.5
    """Share of windows from failed episodes; None takes them as they come. Labels are used for nothing else."""
    checkpoint_steps: int = 250
    """A checkpoint (and a validation) every so many steps."""
    stop_after_cpu_s: float | None = None
    """Write a checkpoint and stop after so many CPU-seconds, to go on later; None trains to the end."""


def flow_matching_loss(
    model: BwmTransformer, batch: Batch, config: TransformerTrainingConfig, random: np.random.Generator
) -> Tensor:
    """Weighted square error of clean latents (or velocities) at the 13 future latent frames, normalised by the weights.

    The anchor stays clean, the history gets noise of the configured level, every window its own future noise level.
    """
    latents = batch.latents
    count = len(latents)
    generator = torch.Generator().manual_seed(int(random.integers(2**62)))
    noise = torch.empty_like(latents).normal_(generator=generator)
    uniform = random.random(count)
    levels = config.shift * uniform / (1.0 + (config.shift - 1.0) * uniform)
    levels = np.where(random.random(count) < config.pure_noise_fraction, 1.0, np.maximum(levels, 0.02))
    sigmas = torch.zeros(count, LATENT_FRAMES)
    sigmas[:, 1:CONDITION_LATENTS] = config.history_noise
    sigmas[:, CONDITION_LATENTS:] = torch.from_numpy(levels.astype(np.float32))[:, None]
    shown = noised(latents, noise, sigmas[:, None, :, None, None])
    weights = batch.weights[:, None]
    future = latents[:, :, CONDITION_LATENTS:]
    last_history = latents[:, :, CONDITION_LATENTS - 1]
    if config.model.objective == "clean":
        error = (model.clean(shown, sigmas, batch.conditioning, last_history, to_float(batch.anchors)) - future).square()
    else:
        velocity = noise[:, :, CONDITION_LATENTS:] - future
        error = (model(shown, sigmas, batch.conditioning) - velocity).square()
    return (error * weights).sum() / (weights.sum() * latents.shape[1])


def initialised(config: TransformerConfig, seed: int) -> BwmTransformer:
    """A transformer with initial weights from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return BwmTransformer(config)


class TransformerTraining:
    """One resumable run in `out`: `checkpoint/` (everything), `metrics.jsonl`; `average.model` is the result."""

    def __init__(self, windows: LatentWindows, config: TransformerTrainingConfig, out: Path, seed: int) -> None:
        self.windows, self.config, self.out, self.seed = windows, config, out, seed
        self.model = initialised(config.model, seed)
        self.average = checkpoint.Average(self.model, initialised(config.model, seed), config.ema_decay)
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
        self.probabilities = windows.probabilities(dict(config.start_weights), config.failure_fraction)
        self._models = {"model": self.model, "average": self.average.model}
        self._directory = out / "checkpoint"
        found = checkpoint.load_training(self._directory, self._models, self.optimizer)
        self.step: int = found["step"] if found else 0
        self.cpu_s: float = found["cpu_s"] if found else 0.0
        checkpoint.forget_metrics(out / "metrics.jsonl", ("transformer", "validation"), self.step)

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Begins with given weights (fine-tuning). Where a checkpoint was resumed they are in it already: no change."""
        if self.step == 0:
            self.model.load_state_dict(weights)
            self.average.model.load_state_dict(weights)

    def run(self, validate: Callable[[BwmTransformer], dict[str, Any]] | None = None) -> bool:
        """Trains to the last step; False if it stopped early at `stop_after_cpu_s`."""
        from rich.progress import Progress

        config, begun, before = self.config, time.process_time(), self.cpu_s
        losses: list[float] = []
        with Progress(transient=True) as bar:
            task = bar.add_task("transformer", total=config.steps, completed=self.step)
            while self.step < config.steps:
                losses.append(self._train_step())
                bar.update(task, advance=1)
                self.cpu_s = before + time.process_time() - begun
                if self.step % 25 == 0:
                    row = {"stage": "transformer", "step": self.step, "loss": float(np.mean(losses))}
                    checkpoint.append_metrics(self.out / "metrics.jsonl", {**row, "cpu_s": self.cpu_s})
                    losses.clear()
                early = config.stop_after_cpu_s is not None and time.process_time() - begun > config.stop_after_cpu_s
                if self.step % config.checkpoint_steps == 0 or early or self.step == config.steps:
                    self._keep(validate)
                if early:
                    return self.step >= config.steps
        return True

    def _train_step(self) -> float:
        config = self.config
        random = np.random.default_rng([self.seed, 4, self.step])
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * learning_rate_factor(self.step, config.steps)
        batch = self.windows.batch(random.choice(len(self.windows), config.batch_size, p=self.probabilities))
        loss = flow_matching_loss(self.model, batch, config, random)
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"loss is {value} at step {self.step}; resume with a lower learning_rate")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.gradient_clip)
        self.optimizer.step()
        self.step += 1
        self.average.update(self.step)
        return value

    def _keep(self, validate: Callable[[BwmTransformer], dict[str, Any]] | None) -> None:
        progress = {"step": self.step, "cpu_s": self.cpu_s}
        checkpoint.save_training(self._directory, self._models, self.optimizer, progress)
        if validate is not None:
            row = {"stage": "validation", "step": self.step, "cpu_s": self.cpu_s, **validate(self.average.model)}
            checkpoint.append_metrics(self.out / "metrics.jsonl", row)


@torch.inference_mode()
def latent_errors(model: BwmTransformer, windows: LatentWindows, count: int, seed: int) -> dict[str, float]:
    """Weighted latent error of one-step predictions with right and with shuffled actions, by start frame.

    Always the same `count` windows (spread evenly) and the same noise.
    """
    errors: dict[str, list[float]] = {}
    for start in (0, 50, 100, 150):
        rows = [number for number, row in enumerate(windows.rows) if row["t"] == start and not row["mirrored"]]
        rows = [rows[int(index)] for index in np.linspace(0, len(rows) - 1, min(count // 4, len(rows)))]
        for part in np.array_split(rows, max(1, len(rows) // 16)):
            batch = windows.batch(part)
            random = np.random.default_rng([seed, 5, start, int(part[0])])
            noise = torch.from_numpy(random.standard_normal(batch.latents.shape, dtype=np.float32))
            sigmas = torch.zeros(len(part), LATENT_FRAMES)
            sigmas[:, CONDITION_LATENTS:] = 1.0
            shown = torch.cat([batch.latents[:, :, :CONDITION_LATENTS], noise[:, :, CONDITION_LATENTS:]], 2)
            last = batch.latents[:, :, CONDITION_LATENTS - 1]
            future, weights = batch.latents[:, :, CONDITION_LATENTS:], batch.weights[:, None]
            for name, conditioning in (("right", batch.conditioning), ("shuffled", batch.conditioning.roll(1, 0))):
                error = (model.clean(shown, sigmas, conditioning, last, to_float(batch.anchors)) - future).square() * weights
                value = error.sum() / (weights.sum() * future.shape[1])
                errors.setdefault(f"latent_error/{name}_{start}", []).append(float(value))
    assert FUTURE_LATENTS == LATENT_FRAMES - CONDITION_LATENTS
    return {name: float(np.mean(values)) for name, values in errors.items()}
