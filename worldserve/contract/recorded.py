"""What a directory on disk says of its contract: data sets record it whole, checkpoints in part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worldserve.contract.default import adjust_bottle_interface
from worldserve.contract.fingerprint import Difference, differences, fingerprint, to_json_value
from worldserve.contract.schema import Contract, Interface
from worldserve.contract.text import from_yaml

# A world model of the embedded size: a latent is 16 pixels high and wide.
_LATENT_PX = 16


@dataclass(frozen=True)
class PartialInterface:
    """What a checkpoint records of the interface it was made for.

    Attributes:
        source: the directory.
        kind: what lies there, in words.
        interface_fingerprint: "" where none is recorded.
        fields: the fields that are recorded, by dotted name.
    """

    source: str
    kind: str
    interface_fingerprint: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def whole(self, candidates: tuple[Interface, ...]) -> Interface | None:
        """The interface that the fingerprint is of, where it is one of the candidates or the default task's."""
        for candidate in (*candidates, adjust_bottle_interface()):
            if self.interface_fingerprint == fingerprint(candidate):
                return candidate
        return None


def recorded_contract(directory: Path) -> Contract | PartialInterface:
    """The contract that a directory records.

    Raises:
        ValueError: it is none of worldserve's, or its data set holds episodes of several contracts.
    """
    contracts = sorted((directory / "meta" / "contracts").glob("*.yaml"))
    if len(contracts) == 1:
        return from_yaml(contracts[0].read_text(encoding="utf-8"))
    if contracts:
        listed = ", ".join(str(path) for path in contracts[:4])
        raise ValueError(
            f"{directory}: expected a data set of one contract; got {len(contracts)}. Name one of them: {listed}"
        )
    for place in (directory, directory / "policy", directory / "model"):
        if (place / "config.json").is_file():
            return _checkpoint(place)
    raise ValueError(
        f"{directory}: expected the directory of a policy, a world model, a reward or a data set; it has neither "
        "config.json nor meta/contracts"
    )


def _checkpoint(directory: Path) -> PartialInterface:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        for recognise in (_policy, _world_model, _reward):
            found = recognise(str(directory), config)
            if found is not None:
                return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{directory}/config.json: expected a checkpoint's settings; got something else ({error})"
        ) from (None)
    raise ValueError(
        f"{directory}: expected a policy, a world model or a reward of worldserve; config.json has the format "
        f"{config.get('format')!r}"
    )


def _policy(source: str, config: Mapping[str, Any]) -> PartialInterface | None:
    if not str(config.get("format", "")).startswith("worldserve.flow_policy/"):
        return None
    policy = config["policy"]
    fields = {
        "timing.chunk_actions": policy["chunk_actions"],
        "observation.height": policy["image_height"],
        "observation.width": policy["image_width"],
        "action.dimensions": policy["action_dimensions"],
    }
    return PartialInterface(source, "policy", policy.get("interface_fingerprint", ""), fields)


def _world_model(source: str, config: Mapping[str, Any]) -> PartialInterface | None:
    if not str(config.get("format", "")).startswith("worldserve-world-model-"):
        return None
    transformer = config["transformer"]
    fields = {
        "observation.height": _LATENT_PX * transformer["latent_height"],
        "observation.width": _LATENT_PX * transformer["latent_width"],
    }
    return PartialInterface(source, "world model", config.get("interface_fingerprint", ""), fields)


def _reward(source: str, config: Mapping[str, Any]) -> PartialInterface | None:
    if "classifier" not in config:
        return None
    classifier = config["classifier"]
    fields = {"observation.height": classifier["height"], "observation.width": classifier["width"]}
    return PartialInterface(source, "reward", config.get("interface_fingerprint", ""), fields)


def compare(first: Contract | PartialInterface, second: Contract | PartialInterface) -> list[Difference]:
    """The fields in which two interfaces differ, of those that both record."""
    known = tuple(side.interface for side in (first, second) if isinstance(side, Contract))
    whole = [side.interface if isinstance(side, Contract) else side.whole(known) for side in (first, second)]
    if whole[0] is not None and whole[1] is not None:
        return differences(whole[0], whole[1])
    expected, got = (_fields(side, found) for side, found in zip((first, second), whole, strict=True))
    found = [
        Difference(name, json.dumps(expected[name]), json.dumps(got[name]))
        for name in expected
        if name in got and expected[name] != got[name]
    ]
    prints = [_fingerprint(side) for side in (first, second)]
    if all(prints) and prints[0] != prints[1]:
        found.append(Difference("interface_fingerprint", prints[0], prints[1]))
    return found


def named_by_both(first: Contract | PartialInterface, second: Contract | PartialInterface) -> str:
    """The interface fingerprint that both record; "" where one of them records none, or they differ."""
    prints = {_fingerprint(side) for side in (first, second)}
    return prints.pop() if len(prints) == 1 else ""


def unrecorded(side: Contract | PartialInterface) -> str:
    """What must be said of a comparison with this side; "" where it records its whole interface."""
    if isinstance(side, Contract) or side.whole(()) is not None:
        return ""
    if side.interface_fingerprint:
        return ""
    return (
        f"{side.source}: a {side.kind} records no interface, only {', '.join(side.fields)}; the rest was not compared"
    )


def _fingerprint(side: Contract | PartialInterface) -> str:
    return fingerprint(side.interface) if isinstance(side, Contract) else side.interface_fingerprint


def _fields(side: Contract | PartialInterface, whole: Interface | None) -> dict[str, Any]:
    if whole is None:
        assert isinstance(side, PartialInterface)
        return dict(side.fields)
    mapping: Any = to_json_value(whole)
    read: dict[str, Callable[[], Any]] = {
        "timing.chunk_actions": lambda: mapping["timing"]["chunk_actions"],
        "observation.height": lambda: mapping["observation"]["height"],
        "observation.width": lambda: mapping["observation"]["width"],
        "action.dimensions": lambda: len(mapping["action"]["dimensions"]),
    }
    return {name: value() for name, value in read.items()}
