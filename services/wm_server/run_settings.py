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
    before = flat(json.loads(path.read_text(encoding="utf-8")))
    now = flat(json.loads(json.dumps(settings, default=str)))
    names = settled(out, stage)
    gated = [bool(settings.get("gate.reward")) for settings in (before, now)]
    found = []
    if gated[0] != gated[1] and GATE in names:
        told = ["a gate" if on else "no gate" for on in gated]
        found.append(f"gate.reward: expected {told[0]}; got {told[1]}")
    for name in sorted(before.keys() | now.keys()):
        unused = name.startswith("codec.") and (before.get("start") or before.get("codec_of")) is not None
        unused = unused or (name.startswith(GATE) and (name == "gate.reward" or not all(gated)))
        if name in FREE or unused or not any(name == prefix or name.startswith(prefix) for prefix in names):
            continue
        if not _same(name, before.get(name), now.get(name)):
            found.append(f"{name}: expected {_shown(before.get(name))}; got {_shown(now.get(name))}")
    if found:
        raise ValueError(
            f"out: {out} holds a run that was made with other settings:\n  "
            + "\n  ".join(found)
            + f"\nGive the settings of {path} to go on with it, or another --out to begin a new run."
        )


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = value
    return result


def of_start_model(config: TransformerTrainingConfig, pose_format: str, start: WorldModel) -> TransformerTrainingConfig:
    """`config` with the network and the history noise of the model that training begins with.

    A setting that was left at its default takes the start model's value; so does `pose_format`, which is only checked.

    Raises:
        ValueError: for a setting that is neither the default nor the start model's.
    """
    default = TransformerTrainingConfig()
    network = start.transformer.config
    wanted = {f"model.{name}": value for name, value in dataclasses.asdict(network).items()}
    wanted["history_noise"] = start.sampler.history_noise
    given, usual = flat(dataclasses.asdict(config)), flat(dataclasses.asdict(default))
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


def _same(name: str, before: Any, now: Any) -> bool:
    if name in PATHS and before and now:
        listed = [value if isinstance(value, list) else [value] for value in (before, now)]
        first, second = ([os.path.realpath(path) for path in paths] for paths in listed)
        return first == second
    # A list that is empty by default was not recorded by older versions.
    return bool(before == now or (not before and now == []))


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value)
