"""The contract of a tabletop simulator: the default interface, and what this machine renders and computes with."""

from __future__ import annotations

import importlib.metadata
import platform

from worldserve.contract import Contract, adjust_bottle


def tabletop_contract(camera: str = "default", judge: str = "ground_truth", reward_fingerprint: str = "") -> Contract:
    """The contract of `tabletop`.

    Args:
        camera: name of the camera.
        judge: "ground_truth" where the reward is the simulator's own success, "reward_model" with a reward server.
        reward_fingerprint: provenance fingerprint of that reward server, "" without one.
    """
    facts = {
        "camera": camera,
        "device_class": f"cpu-{platform.machine()}",
        "judge": judge,
        "numpy": importlib.metadata.version("numpy"),
        "renderer": "sapien rasteriser, own shaders, llvmpipe",
        "reward_provenance": reward_fingerprint,
        "sapien": importlib.metadata.version("sapien"),
        "seed_effect": "none",
    }
    return adjust_bottle("simulator", "tabletop", facts)
