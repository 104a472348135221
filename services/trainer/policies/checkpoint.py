"""A policy on disk: model.safetensors, config.json and card.json in a directory that appears whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file

from services.trainer.policies.config import FlowPolicyConfig
from services.trainer.policies.flow_policy import FlowPolicy

FORMAT = "worldserve.flow_policy/1"


def save_policy(policy: FlowPolicy, directory: str | Path, card: Mapping[str, object]) -> Path:
    """Writes the policy to `directory`, replacing one that is there.

    `card` (JSON values) says where the weights come from: command, data, seeds, figures.
    """
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in policy.state_dict().items()}
        save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
        config = {"format": FORMAT, "policy": dataclasses.asdict(policy.config)}
        (scratch / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        (scratch / "card.json").write_text(json.dumps(dict(card), indent=2, sort_keys=True, allow_nan=False) + "\n")
        scratch.chmod(0o755)
        if target.exists():
            previous = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)) / "previous"
            os.rename(target, previous)
            os.rename(scratch, target)
            shutil.rmtree(previous.parent)
        else:
            os.rename(scratch, target)
    finally:
        if scratch.exists():
            shutil.rmtree(scratch)
    return target


def load_policy(directory: str | Path) -> FlowPolicy:
    """Reads what `save_policy` wrote. Raises FileNotFoundError or ValueError, naming the file and what was expected."""
    source = Path(directory)
    for name in ("config.json", "model.safetensors"):
        if not (source / name).is_file():
            raise FileNotFoundError(f"{source / name}: expected a policy saved by `worldserve sft` or `worldserve ppo`")
    stored = json.loads((source / "config.json").read_text())
    if stored.get("format") != FORMAT:
        raise ValueError(f"{source / 'config.json'}: expected format {FORMAT}; got {stored.get('format')!r}")
    fields = dict(stored["policy"])
    known = {field.name for field in dataclasses.fields(FlowPolicyConfig)}
    if unknown := set(fields) - known:
        raise ValueError(f"{source / 'config.json'}: unknown settings {sorted(unknown)}; written by another version?")
    for name in ("gripper_dimensions", "noise_steps"):
        fields[name] = tuple(fields[name])
    policy = FlowPolicy(FlowPolicyConfig(**fields))
    policy.load_state_dict(load_file(source / "model.safetensors"), strict=True)
    return policy.eval()
