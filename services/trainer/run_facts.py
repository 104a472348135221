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
from worldserve.settings import refuse_changed_settings
from worldserve.version import __version__


class PolicyInterfaceError(ValueError):
    """A policy was trained for another interface than the target's: its actions would mean something else there.

    What to do: Give a target of the policy's interface, or a policy trained for the target's.
    """


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


# Facts of a server that say how a frame is computed or who judges it, and not which frame is drawn.
NOT_DRAWN = frozenset({
    "device_class", "diffusers", "judge", "reward_provenance", "threads", "torch", "weights_sha256",
})  # fmt: skip


def target_identity(contract: Contract) -> dict[str, Any]:
    """What a measure says of its target, for `worldserve admit`; "" for what the server does not say.

    `target_drawn` are the facts beside the weights that change what is drawn (noise levels, scale of the poses, ...):
    all that a server states but for threads, versions, device and judge, so that one which is added later counts too.
    """
    facts, prints = contract.provenance.facts, contract_fingerprints(contract)
    return {
        "target_weights_sha256": facts.get("weights_sha256", ""),
        "target_provenance": prints["provenance"],
        "reward_provenance": facts.get("reward_provenance", ""),
        "interface": prints["interface"],
        "target_drawn": {name: value for name, value in sorted(facts.items()) if name not in NOT_DRAWN},
    }


def judge_of(contract: Contract) -> str:
    """Who judges there: "reward_model", "ground_truth" or "none"; "" where the server does not say."""
    return contract.provenance.facts.get("judge", "")


def check_reward_source(contract: Contract, target: str, source: str) -> None:
    """Raises ValueError where a target cannot give the reward `source` ("verdict" or "success"), so far as it says."""
    kind, judge = contract.provenance.kind, judge_of(contract)
    if kind not in ("simulator", "world_model"):
        raise ValueError(f"target: expected a simulator or a world model; {target} is a {kind}. Name another --target.")
    if source == "success" and kind != "simulator":
        raise ValueError(
            f"reward_source: expected a simulator for 'success', since it alone knows the true success; {target} is a "
            f"{kind}. Use --reward-source verdict, or name a simulator as --target."
        )
    if source == "verdict" and judge in ("none", "ground_truth"):
        other = ", or use --reward-source success" if kind == "simulator" else ""
        raise ValueError(
            f"reward_source: expected a target with a reward server for 'verdict'; {target} has none. Start that "
            f"target again with --reward HOST:PORT{other}."
        )


def check_same_target(directory: Path, contract: Contract, target: str) -> None:
    """Raises ValueError where the last start in `directory`/run.json was in another target; its address may change."""
    path = directory / "run.json"
    starts = read_json(path)["starts"] if path.exists() else []
    before = starts[-1]["target"] if starts else None
    if before is None:
        return
    now = {"kind": contract.provenance.kind, **contract_fingerprints(contract)}
    former = f"{before.get('address')}, a {before.get('kind')}"
    refuse_changed_settings(
        {name: before.get(name) for name in now},
        now,
        what=f"resume: the run in {directory} went on in {former}; {target} is another target",
        advice="Start the former server again (its port may change), or give another --out.",
    )


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
