"""Settings of a run in a directory: what was made under some settings is never gone on with under others."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.wm_server import checkpoint
from services.wm_server.model import WorldModel
from services.wm_server.transformer_training import TransformerTrainingConfig
from worldserve.settings import flat_settings, refuse_changed_settings

# How a run is carried out, not what it computes.
FREE = (
    "out", "latents", "stage", "threads", "measure_episodes", "device", "precision", "reward",
    "transformer.stop_after_cpu_s", "transformer.checkpoint_steps",
)  # fmt: skip
# All that the stage `measure` reads of a run: which episodes never trained its model.
MEASURED = ("held_out_fraction",)
PATHS = ("data", "start", "codec_of", "gate.data")
# The address of the gate's reward server may change; which reward model it is, is held to by the gate itself.
GATE = "gate."


def settled(out: Path, stage: str) -> tuple[str, ...]:
    """Names (or beginnings of names) of the settings that `out` already depends on, given what was made there."""
    if stage == "measure":
        return MEASURED
    made = ("codec_training", "codec.safetensors", "pose_statistics.safetensors", "latents")
    encoded = any((out / name).exists() for name in made)
    trained = checkpoint.has_training(out / "checkpoint") or (out / "model").exists()
    names: list[str] = []
    if encoded or trained:
        names += [
            "data",
            "start",
            "codec_of",
            "seed",
            "held_out_fraction",
            "pose_format",
            "normalisation",
            "codec.",
            "windows.",
        ]
    if trained:
        names += ["transformer.", "sigmas", GATE]
    return tuple(names)


def refuse_changes(out: Path, stage: str, settings: Mapping[str, Any]) -> None:
    """Compares `settings` (nested, as of `dataclasses.asdict`) with those in `out`/config.json, if a run is there.

    The codec's settings count only without a start model, which brings its own codec.

    Raises:
        ValueError: with every setting that differs and that something in `out` was made with.
    """
    path = out / "config.json"
    if not path.exists():
        return
    before, now = flat_settings(json.loads(path.read_text(encoding="utf-8"))), flat_settings(settings)
    names = settled(out, stage)
    unused = ("codec.",) if before.get("start") or before.get("codec_of") else ()
    gated = [bool(values.get("gate.reward")) for values in (before, now)]

    def held(values: Mapping[str, Any]) -> dict[str, Any]:
        """What `out` depends on of `values`, comparable."""
        found = {name: _resolved(name, value) for name, value in values.items() if name.startswith(names)}
        found = {name: value for name, value in found.items() if name not in FREE and not name.startswith(unused)}
        if GATE in names:
            if not all(gated):
                found = {name: value for name, value in found.items() if not name.startswith(GATE)}
            found["gate.reward"] = "a gate" if values.get("gate.reward") else "no gate"
        # A list that is empty by default was not recorded by older versions.
        return {name: value for name, value in found.items() if value != []}

    refuse_changed_settings(
        held(before),
        held(now),
        what=f"out: {out} holds a run that was made with other settings",
        advice=f"Give the settings of {path} to go on with it, or another --out to begin a new run.",
    )


def of_start_model(config: TransformerTrainingConfig, pose_format: str, start: WorldModel) -> TransformerTrainingConfig:
    """`config` with the network and the history noise of the model that training begins with.

    A setting that was left at its default takes the start model's value; so does `pose_format`, which is only checked.

    Raises:
        ValueError: for a setting that is neither the default nor the start model's.
    """
    default = TransformerTrainingConfig()
    network = start.transformer.config
    wanted = flat_settings({"model": dataclasses.asdict(network), "history_noise": start.sampler.history_noise})
    given, usual = (flat_settings(dataclasses.asdict(values)) for values in (config, default))
    found = []
    if pose_format not in (start.pose_format, "rotation_columns"):
        found.append(f"pose_format: expected {start.pose_format!r}; got {pose_format!r}")
    found += [
        f"transformer.{name}: expected {value!r}; got {given[name]!r}"
        for name, value in wanted.items()
        if given[name] not in (value, usual[name])
    ]
    if found:
        raise ValueError(
            "start: the start model's network, history noise and pose format are kept, but other ones were given:\n  "
            + "\n  ".join(found)
            + "\nLeave these settings out, or train from the beginning without --start."
        )
    return dataclasses.replace(config, model=network, history_noise=start.sampler.history_noise)


def _resolved(name: str, value: Any) -> Any:
    """Paths as the files they name, however they are written."""
    if name not in PATHS or not value:
        return value
    return [os.path.realpath(path) for path in (value if isinstance(value, list) else [value])]
