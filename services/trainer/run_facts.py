"""What a run depends on beyond its settings: the target's contract, its inputs' hashes, versions. Kept in run.json."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from services.trainer.policies import FlowPolicy
from services.trainer.run_record import read_json, write_json
from worldserve.contract import Contract, fingerprint
from worldserve.files import file_sha256
from worldserve.version import __version__


class PolicyInterfaceError(ValueError):
    """A policy was trained for another interface than the target's: its actions would mean something else there."""


def check_policy_interface(policy: FlowPolicy, directory: Path, contract: Contract, target: str) -> None:
    """Raises PolicyInterfaceError where policy and target name different interfaces; "" names none and passes."""
    expected, got = policy.config.interface_fingerprint, fingerprint(contract.interface)
    if expected and expected != got:
        raise PolicyInterfaceError(
            f"policy {directory}: expected a target with interface {expected}, for which it was trained; {target} has "
            f"{got}. Name another --target or --policy; `worldserve contract diff` shows in which fields contracts "
            "differ, `worldserve sft` trains a policy on episodes of this target."
        )


def contract_fingerprints(contract: Contract) -> dict[str, str]:
    """SHA-256 of both parts: {"interface": ..., "provenance": ...}."""
    return {"interface": fingerprint(contract.interface), "provenance": fingerprint(contract.provenance)}


def policy_facts(directory: Path) -> dict[str, str]:
    """Where a policy lies and what it is: hashes of its weights and of its settings (which hold its noise)."""
    return {
        "path": str(directory),
        "model_sha256": file_sha256(directory / "model.safetensors"),
        "config_sha256": file_sha256(directory / "config.json"),
    }


def write_run(
    directory: Path, command: str, target: str, contract: Contract, inputs: Mapping[str, Mapping[str, Any]]
) -> None:
    """Note the start of a run in `directory`/run.json: {"starts": [...]}, one entry a start, resumed ones as well.

    Args:
        command: for example "worldserve ppo".
        target: HOST:PORT of the server that `contract` is of.
        inputs: by name, each with its path and hashes.
    """
    path = directory / "run.json"
    starts = list(read_json(path)["starts"]) if path.exists() else []
    start = {
        "command": command,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"worldserve": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "target": {
            "address": target,
            "kind": contract.provenance.kind,
            "backend": contract.provenance.backend,
            **contract_fingerprints(contract),
        },
        "inputs": inputs,
    }
    write_json(path, {"starts": [*starts, start]})
