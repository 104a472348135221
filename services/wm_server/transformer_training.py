"""Trains the transformer on encoded windows: flow matching on the future latents alone.

Success labels never reach the loss: a `Batch` has none. They decide how often windows are drawn (`failure_fraction`,
in `mixing.mixed_probabilities`), and the stop gate (`gate.py`) which step is kept; splits go by initial state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from services.wm_server import checkpoint
from services.wm_server.codec import to_float
from services.wm_server.codec_training import learning_rate_factor
from services.wm_server.dataset import FUTURE_LATENTS, Batch, LatentWindows
from services.wm_server.devices import autocast
from services.wm_server.distributed import Placement, full_state, load_full_state, materialise, on_meta, shard
from services.wm_server.mixing import mixed_probabilities
from services.wm_server.sampler import noised
from services.wm_server.transformer import BwmTransformer, TransformerConfig
from services.wm_server.windows import CONDITION_LATENTS, LATENT_FRAMES, PoseStatistics


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
    data_weights: tuple[float, ...] = ()
    """Share of windows from each --data directory, one number each, in any unit; none takes them as they come. Start
    frames and failures then have their shares inside each directory."""
    checkpoint_steps: int = 250
    """A checkpoint (and a validation) every so many steps."""
    stop_after_cpu_s: float | None = None
    """Write a checkpoint and stop after so many CPU-seconds, to go on later; None trains to the end."""


class Gate(Protocol):
    """What may stop a run before its last step; see `gate.StopGate`."""

    def due(self, step: int) -> bool:
        """Whether this step is judged; the same in every rank."""

    def stops(self, step: int, average: BwmTransformer) -> bool:
        """Judges the averaged weights of `step`; rank 0 alone is asked."""


def flow_matching_loss(
    model: BwmTransformer,
    batch: Batch,
    config: TransformerTrainingConfig,
    random: np.random.Generator,
    placement: Placement | None = None,
    count: int | None = None,
) -> Tensor:
    """Weighted square error of clean latents (or velocities) at the 13 future latent frames, normalised by the weights.

    The anchor stays clean, the history gets noise of the configured level, every window its own future noise level.
    There is no success label in it: a `Batch` holds latents, weights by colour change, and conditioning alone.

    Args:
        model: the network.
        batch: windows, on the CPU.
        config: levels and objective.
        random: for noise and levels of the whole global batch.
        placement: where it is computed, and by which ranks; None is one process on the CPU in fp32.
        count: windows of the global batch, of which `batch` is `ranks.share(count)`; None means that it is all of them.

    Returns:
        Scalar float32. With several ranks, the mean over ranks of the value (and of its gradient, as FSDP reduces
        them) is that of the global batch.
    """
    placement = placement or Placement()
    ranks, device = placement.ranks, placement.device
    latents = batch.latents
    count = len(latents) if count is None else count
    generator = torch.Generator().manual_seed(int(random.integers(2**62)))
    noise = torch.empty(count, *latents.shape[1:]).normal_(generator=generator)
    uniform = random.random(count)
    levels = config.shift * uniform / (1.0 + (config.shift - 1.0) * uniform)
    levels = np.where(random.random(count) < config.pure_noise_fraction, 1.0, np.maximum(levels, 0.02))
    if ranks.count > 1:
        share = ranks.share(count)
        noise, levels = noise[torch.from_numpy(share)], levels[share]
    sigmas = torch.zeros(len(latents), LATENT_FRAMES)
    sigmas[:, 1:CONDITION_LATENTS] = config.history_noise
    sigmas[:, CONDITION_LATENTS:] = torch.from_numpy(levels.astype(np.float32))[:, None]
    latents, noise, sigmas = latents.to(device), noise.to(device), sigmas.to(device)
    conditioning, weights = batch.conditioning.to(device), batch.weights[:, None].to(device)
    anchors = to_float(batch.anchors.to(device))
    shown = noised(latents, noise, sigmas[:, None, :, None, None])
    future = latents[:, :, CONDITION_LATENTS:]
    last_history = latents[:, :, CONDITION_LATENTS - 1]
    with autocast(device, placement.precision):
        if config.model.objective == "clean":
            difference = model.clean(shown, sigmas, conditioning, last_history, anchors) - future
        else:
            velocity = noise[:, :, CONDITION_LATENTS:] - future
            difference = model(shown, sigmas, conditioning, anchors) - velocity
    error = difference.float().square()
    total = ranks.total(weights.sum()) if ranks.count > 1 else weights.sum()
    loss = (error * weights).sum() / (total * latents.shape[1])
    return loss * ranks.count if ranks.count > 1 else loss


def initialised(config: TransformerConfig, seed: int, statistics: PoseStatistics | None = None) -> BwmTransformer:
    """A transformer with initial weights from `seed`; pose maps undo the normalisation of `statistics`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = BwmTransformer(config)
    if statistics is not None and config.pose_map_channels:
        model.pose_maps.low.copy_(torch.from_numpy(statistics.low))
        model.pose_maps.high.copy_(torch.from_numpy(statistics.high))
    return model


class TransformerTraining:
    """One resumable run in `out`: `checkpoint/` (everything), `metrics.jsonl`; the averaged weights are the result.

    Args:
        windows: what is trained on.
        config: settings.
        out: directory of the run.
        seed: of initial weights, batches and noise.
        placement: device, precision and ranks; None is one process on the CPU in fp32.
        start: weights to begin with (fine-tuning) where there is no checkpoint; None begins with initial ones.
        directories: directory of each episode, for `data_weights`.
        statistics: the poses' normalisation, which pose maps undo; needed where there are such and no `start`.
    """

    def __init__(
        self,
        windows: LatentWindows,
        config: TransformerTrainingConfig,
        out: Path,
        seed: int,
        placement: Placement | None = None,
        start: Mapping[str, Tensor] | None = None,
        directories: Mapping[str, int] | None = None,
        statistics: PoseStatistics | None = None,
    ) -> None:
        self._statistics = statistics
        self.windows, self.config, self.out, self.seed = windows, config, out, seed
        self.placement = placement or Placement()
        self.ranks = self.placement.ranks
        if config.batch_size < self.ranks.count:
            raise ValueError(
                f"transformer.batch_size: expected at least one window for each of the {self.ranks.count} ranks; "
                f"got {config.batch_size}"
            )
        self.model, average = self._network(start), self._network(start)
        self.average = checkpoint.Average(self.model, average, config.ema_decay)
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
        shares = (dict(config.start_weights), config.failure_fraction, directories, config.data_weights)
        self.probabilities = mixed_probabilities(windows, *shares)
        self._models = {"model": self.model, "average": self.average.model}
        self._directory = out / "checkpoint"
        with self.ranks.main_first():
            found = checkpoint.load_training(self._directory, self._models, self.optimizer, self.ranks.is_main)
        self.step: int = found["step"] if found else 0
        self.cpu_s: float = found["cpu_s"] if found else 0.0
        self.stopped = False
        if self.ranks.is_main:
            checkpoint.forget_metrics(out / "metrics.jsonl", ("transformer", "validation"), self.step)

    def _network(self, start: Mapping[str, Tensor] | None) -> BwmTransformer:
        """A network on the device, with weights from `start` or initial ones; sharded where there are several ranks."""
        placement = self.placement
        if self.ranks.count > 1 and start is not None:
            # A large one never stands whole on a device, nor twice in the memory of its host.
            model = on_meta(self.config.model)
            shard(model, placement)
            materialise(model, placement.device)
        else:
            model = initialised(self.config.model, self.seed, self._statistics).to(placement.device)
            if self.ranks.count > 1:
                shard(model, placement)
        if start is not None:
            load_full_state(model, dict(start))
        return model

    def averaged(self) -> BwmTransformer | None:
        """The averaged weights as a whole network on the device in rank 0, which is the result; None in other ranks."""
        state = full_state(self.average.model, self.ranks.is_main)
        if not self.ranks.is_main:
            return None
        whole = BwmTransformer(self.config.model)
        whole.load_state_dict(state)
        return whole.to(self.placement.device).requires_grad_(False)

    def run(self, validate: Callable[[BwmTransformer], dict[str, Any]] | None = None, gate: Gate | None = None) -> bool:
        """Trains to the last step, or to the one at which `gate` stops it (`stopped`); False where
        `stop_after_cpu_s` interrupted it.

        `validate` gets the averaged weights of every checkpoint, in rank 0.
        """
        from rich.progress import Progress

        config, begun, before = self.config, time.process_time(), self.cpu_s
        losses: list[float] = []
        if gate is not None and gate.due(self.step):  # the start, or a step that a kill left unjudged
            self._judge(gate, self.averaged())
        with Progress(transient=True, disable=not self.ranks.is_main) as bar:
            task = bar.add_task("transformer", total=config.steps, completed=self.step)
            while self.step < config.steps and not self.stopped:
                losses.append(self._train_step())
                bar.update(task, advance=1)
                self.cpu_s = before + time.process_time() - begun
                if self.step % 25 == 0:
                    row = {"stage": "transformer", "step": self.step, "loss": float(np.mean(losses))}
                    self._note({**row, "cpu_s": self.cpu_s})
                    losses.clear()
                early = config.stop_after_cpu_s is not None and self.ranks.agree(
                    time.process_time() - begun > config.stop_after_cpu_s
                )
                last = self.step == config.steps
                judged = gate is not None and gate.due(self.step)
                if self.step % config.checkpoint_steps == 0 or early or last or judged:
                    self._keep(validate, gate)
                if early:
                    return last or self.stopped
        return True

    def _train_step(self) -> float:
        config, ranks = self.config, self.ranks
        random = np.random.default_rng([self.seed, 4, self.step])
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * learning_rate_factor(self.step, config.steps)
        # Every rank draws the same global batch and takes its share of it.
        rows = random.choice(len(self.windows), config.batch_size, p=self.probabilities)
        batch = self.windows.batch(rows[ranks.share(config.batch_size)])
        loss = flow_matching_loss(self.model, batch, config, random, self.placement, config.batch_size)
        value = ranks.total(loss).item() / ranks.count
        if not math.isfinite(value):
            raise FloatingPointError(f"loss is {value} at step {self.step}; resume with a lower learning_rate")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.gradient_clip)
        self.optimizer.step()
        self.step += 1
        self.average.update(self.step)
        return value

    def _keep(self, validate: Callable[[BwmTransformer], dict[str, Any]] | None, gate: Gate | None) -> None:
        progress = {"step": self.step, "cpu_s": self.cpu_s}
        checkpoint.save_training(self._directory, self._models, self.optimizer, progress, self.ranks.is_main)
        average = self.averaged()
        if validate is not None and average is not None:
            self._note({"stage": "validation", "step": self.step, "cpu_s": self.cpu_s, **validate(average)})
        if gate is not None and gate.due(self.step):
            self._judge(gate, average)

    def _judge(self, gate: Gate, average: BwmTransformer | None) -> None:
        self.stopped = self.ranks.agree(average is not None and gate.stops(self.step, average))

    def _note(self, row: Mapping[str, Any]) -> None:
        if self.ranks.is_main:
            checkpoint.append_metrics(self.out / "metrics.jsonl", row)


@torch.inference_mode()
def latent_errors(model: BwmTransformer, windows: LatentWindows, count: int, seed: int) -> dict[str, float]:
    """Weighted latent error of one-step predictions with right and with shuffled actions, by start frame.

    Always the same `count` windows (spread evenly) and the same noise.
    """
    errors: dict[str, list[float]] = {}
    device = next(model.parameters()).device
    for start in (0, 50, 100, 150):
        rows = [number for number, row in enumerate(windows.rows) if row["t"] == start and not row["mirrored"]]
        rows = [rows[int(index)] for index in np.linspace(0, len(rows) - 1, min(count // 4, len(rows)))]
        for part in np.array_split(rows, max(1, len(rows) // 16)):
            batch = windows.batch(part)
            batch, anchors = batch.to(device), to_float(batch.anchors.to(device))
            random = np.random.default_rng([seed, 5, start, int(part[0])])
            noise = torch.from_numpy(random.standard_normal(batch.latents.shape, dtype=np.float32)).to(device)
            sigmas = torch.zeros(len(part), LATENT_FRAMES, device=device)
            sigmas[:, CONDITION_LATENTS:] = 1.0
            shown = torch.cat([batch.latents[:, :, :CONDITION_LATENTS], noise[:, :, CONDITION_LATENTS:]], 2)
            last = batch.latents[:, :, CONDITION_LATENTS - 1]
            future, weights = batch.latents[:, :, CONDITION_LATENTS:], batch.weights[:, None]
            for name, conditioning in (("right", batch.conditioning), ("shuffled", batch.conditioning.roll(1, 0))):
                error = (model.clean(shown, sigmas, conditioning, last, anchors) - future).square() * weights
                value = error.sum() / (weights.sum() * future.shape[1])
                errors.setdefault(f"latent_error/{name}_{start}", []).append(float(value))
    assert FUTURE_LATENTS == LATENT_FRAMES - CONDITION_LATENTS
    return {name: float(np.mean(values)) for name, values in errors.items()}
