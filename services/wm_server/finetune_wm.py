"""Train or fine-tune a world model: codec, latents, transformer."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

# Read when torch is imported: threads that spin while they wait starve the other processes of a small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
import torch
from safetensors.torch import load_file

from services.wm_server import checkpoint
from services.wm_server.codec import VideoCodec
from services.wm_server.codec_training import CodecTrainingConfig, train_codec
from services.wm_server.dataset import LatentWindows, WindowChoice, encode_windows, pose_statistics
from services.wm_server.episodes import EpisodeSubset, load_episodes
from services.wm_server.measure import FinalFrameScorer, moving_error, outcome_accuracy
from services.wm_server.model import WorldModel
from services.wm_server.run_settings import of_start_model, refuse_changes
from services.wm_server.sampler import SamplerConfig
from services.wm_server.transformer import BwmTransformer
from services.wm_server.transformer_training import TransformerTraining, TransformerTrainingConfig, latent_errors
from services.wm_server.windows import PoseStatistics
from worldserve.files import file_sha256

SUMMARY = "Train or fine-tune a world model on recorded episodes; interrupted runs go on where they were."
STAGES = ("codec", "latents", "transformer", "measure")


@dataclass(frozen=True)
class FinetuneConfig:
    """Trains or fine-tunes a world model on recorded episodes: codec, latents, transformer, measure.

    The stages run in order, each from what the one before left in `out`; what is finished is not done again, and what
    was made under some settings is not gone on with under others (`measure` alone may be given other data).

    Examples:
        worldserve finetune-wm --data runs/demos runs/noisy --out runs/wm
        worldserve finetune-wm --data runs/rollouts --out runs/wm-tuned --start weights/bwm-mini --transformer.steps 750
        worldserve finetune-wm --data runs/noisy --out runs/wm --stage measure --measure-episodes 100
        worldserve serve-wm --weights runs/wm/model
    """

    out: Path
    """Directory of the run; the model of the newest checkpoint is in OUT/model."""
    data: tuple[Path, ...] = ()
    """Directories of recorded episodes."""
    stage: Literal["all", "codec", "latents", "transformer", "measure"] = "all"
    """The only stage to run, or all."""
    start: Path | None = None
    """A model to begin with: its codec, statistics, pose format, size of the network (`transformer.model`) and history
    noise are kept (leave those settings out), its transformer is trained on."""
    codec: CodecTrainingConfig = field(default_factory=CodecTrainingConfig)
    """The codec's training; unused with `start`."""
    windows: WindowChoice = field(default_factory=WindowChoice)
    """Which windows are encoded."""
    transformer: TransformerTrainingConfig = field(default_factory=TransformerTrainingConfig)
    """The transformer's training."""
    sigmas: tuple[float, ...] = (1.0,)
    """Noise levels of the sampler that the model is saved with."""
    pose_format: Literal["rotation_columns", "euler"] = "rotation_columns"
    """How poses condition the model; the published BWM takes Euler angles."""
    held_out_fraction: float = 0.1
    """Share of initial states whose episodes validate and never train."""
    seed: int = 0
    """Of weights, batches and noise."""
    threads: int = 1
    """CPU threads."""
    measure_episodes: int = 60
    """Held-out episodes that the last stage draws."""

    def __post_init__(self) -> None:
        if not 0.0 < self.held_out_fraction < 1.0:
            raise ValueError(f"held_out_fraction: expected between 0 and 1; got {self.held_out_fraction!r}")
        if self.windows.mirror and self.pose_format != "rotation_columns":
            raise ValueError("windows.mirror: needs pose_format rotation_columns; got euler. Give --windows.no-mirror")
        if self.threads < 1 or self.measure_episodes < 1:
            raise ValueError(
                f"threads, measure_episodes: expected at least 1; got {self.threads}, {self.measure_episodes}"
            )
        if not self.data:
            raise ValueError("data: expected at least one directory of recorded episodes; got none")


class Finetune:
    """One run: the stages over one configuration."""

    def __init__(self, config: FinetuneConfig) -> None:
        self.start = WorldModel.load(config.start) if config.start else None
        if self.start is not None and config.stage != "measure":
            transformer = of_start_model(config.transformer, config.pose_format, self.start)
            pose_format = cast(Literal["rotation_columns", "euler"], self.start.pose_format)
            config = replace(config, transformer=transformer, pose_format=pose_format)
        self.config, self.out = config, config.out
        refuse_changes(self.out, config.stage, asdict(config))
        self.training, self.validation = load_episodes(config.data, config.held_out_fraction)
        if config.stage != "measure":
            checkpoint.write_json(self.out / "config.json", asdict(config))

    def run(self) -> bool:
        """Runs the stages; False when the transformer stopped early, to be gone on with."""
        chosen = STAGES if self.config.stage == "all" else (self.config.stage,)
        for stage in chosen:
            if stage == "codec":
                self.codec()
            elif stage == "latents":
                self.latents()
            elif stage == "transformer":
                if not self.transformer():
                    return False
            else:
                self.measure()
        return True

    def codec(self) -> VideoCodec:
        """The start model's codec, the trained one, or one trained now."""
        if self.start is not None:
            return self.start.codec
        path = self.out / "codec.safetensors"
        if not path.exists():
            return train_codec(self.training, self.config.codec, self.out, self.config.seed).eval()
        codec = VideoCodec(self.config.codec.model)
        codec.load_state_dict(load_file(str(path)))
        return codec.eval()

    def statistics(self) -> PoseStatistics:
        """The start model's pose percentiles, or those of the training episodes."""
        path = self.out / "pose_statistics.safetensors"
        if self.start is not None:
            return self.start.statistics
        if not path.exists():
            found = pose_statistics(self.training, self.config.pose_format, self.config.windows.mirror)
            state = {"low": torch.from_numpy(found.low), "high": torch.from_numpy(found.high)}
            checkpoint.save_tensors(state, path)
        state = load_file(str(path))
        return PoseStatistics(state["low"].numpy(), state["high"].numpy())

    def latents(self) -> tuple[LatentWindows, LatentWindows]:
        """Training and validation windows, encoded now where they are not there."""
        config, codec = self.config, self.codec()
        checkpoint.save_tensors(codec.state_dict(), self.out / "latents" / "codec.safetensors")
        key = {"codec": file_sha256(self.out / "latents" / "codec.safetensors")}
        made = []
        for name, episodes in (("training", self.training), ("validation", self.validation)):
            choice = config.windows if name == "training" else WindowChoice(random_starts=0, mirror=False)
            directory = self.out / "latents" / name
            args = (self.statistics(), choice, config.pose_format, directory, config.seed, key)
            made.append(encode_windows(episodes, codec, *args))
        return made[0], made[1]

    def transformer(self) -> bool:
        """Trains and saves the model; False when it stopped early."""
        config = self.config
        training_windows, validation_windows = self.latents()
        training = TransformerTraining(training_windows, config.transformer, self.out, config.seed)
        if self.start is not None:
            training.start_from(self.start.transformer.state_dict())

        def validate(model: BwmTransformer) -> dict[str, Any]:
            self._save(training)
            return latent_errors(model, validation_windows, 160, config.seed)

        finished = training.run(validate)
        if self._saved_step() != training.step:  # killed after the last checkpoint, before its model was written
            self._save(training)
        return finished

    def _saved_step(self) -> int | None:
        path = self.out / "model" / "config.json"
        if not path.exists():
            return None
        step: int = json.loads(path.read_text(encoding="utf-8"))["card"]["steps"]
        return step

    def _save(self, training: TransformerTraining) -> None:
        config = self.config
        codec = self.codec()
        sampler = SamplerConfig(config.sigmas, config.transformer.history_noise)
        average = BwmTransformer(config.transformer.model)
        average.load_state_dict(training.average.model.state_dict())
        model = WorldModel(codec, average, sampler, self.statistics(), config.pose_format)
        failures = sum(info.success is False for info in self.training.infos)
        card = {
            "data": [str(directory) for directory in config.data],
            "training_episodes": len(self.training),
            "training_failures": failures,
            "held_out_episodes": len(self.validation),
            "steps": training.step,
            "cpu_s": training.cpu_s,
            "seed": config.seed,
            "config": asdict(config),
        }
        model.save(self.out / "model", card)

    def measure(self) -> dict[str, Any]:
        """Draws held-out episodes: moving pixels with right and shuffled actions, and outcomes."""
        model = WorldModel.load(self.out / "model")
        episodes = self._measured()
        moving = moving_error(model, episodes[: max(1, self.config.measure_episodes // 3)])
        result: dict[str, Any] = {"moving": {**asdict(moving), "gap_db": moving.gap_db}, "steps": model.sampler.sigmas}
        if {bool(episode.success) for episode in episodes} == {True, False}:
            scorer = FinalFrameScorer(*last_frames(self.training))
            frames, success = last_frames(episodes)
            accuracy, _ = outcome_accuracy(model, episodes, scorer)
            result["outcome"] = {
                **asdict(accuracy),
                "fake_success": accuracy.fake_success,
                "recall": accuracy.recall,
                "balanced": accuracy.balanced,
                "scorer_accuracy": float(((scorer.score(frames) > 0.0) == success).mean()),
            }
        checkpoint.write_json(self.out / "measure.json", result)
        return result

    def _measured(self) -> EpisodeSubset:
        """Held-out episodes, failures and successes in turn."""
        labels = [bool(info.success) for info in self.validation.infos]
        kinds = [[i for i, label in enumerate(labels) if label is kind] for kind in (False, True)]
        order = [i for pair in zip(*kinds) for i in pair] or list(range(len(labels)))
        positions = [self.validation.positions[i] for i in order[: self.config.measure_episodes]]
        return EpisodeSubset(self.validation.reader, positions)


def last_frames(episodes: Sequence[Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Last frames uint8 (n, height, width, 3) and success bool (n,)."""
    frames = [episode.frames_at([episode.action_count])[0] for episode in episodes]
    return np.stack(frames), np.array([bool(episode.success) for episode in episodes])


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve finetune-wm`."""
    import tyro

    config = tyro.cli(
        FinetuneConfig, args=argv, prog="worldserve finetune-wm", description=inspect.getdoc(FinetuneConfig)
    )
    torch.set_num_threads(config.threads)
    try:
        run = Finetune(config)
        finished = run.run()
    except KeyboardInterrupt:
        print(f"interrupted; go on with the same command ({config.out})", file=sys.stderr)
        return 130
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        print(f"worldserve finetune-wm: {error}", file=sys.stderr)
        return 1
    if not finished:
        print(f"stopped after {config.transformer.stop_after_cpu_s} CPU-s; go on with the same command")
    if (config.out / "measure.json").exists():
        print((config.out / "measure.json").read_text(encoding="utf-8"))
    if (config.out / "model" / "config.json").exists():
        print(
            f"world model: {config.out / 'model'}; serve it with `worldserve serve-wm --weights {config.out / 'model'}`"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
