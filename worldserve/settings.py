"""Settings that a directory was made with: what was made under some is never gone on with under others."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import Any


def refuse_changed_settings(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    what: str,
    advice: str,
    free: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Compare the settings that a directory was made with and those that were asked for, by dotted names.

    Both may be nested (as of `dataclasses.asdict`), and both are compared as JSON would give them back, so either may
    be read from a file. A setting that one side does not know counts as what `defaults` says it meant, or else as None:
    one that was added since stops no earlier work while it has that value. A caller that adds a setting whose default
    is not None names in `defaults` what was done before there was one.

    Args:
        before: what was recorded.
        now: what was asked for.
        what: the message's beginning, which names the flag, the directory and what it holds, without a colon at its
            end: "out: runs/a holds an evaluation that was made with other settings".
        advice: the message's end, what to do: "Give those, or choose another --out."
        free: names of settings that may change, each with all that is nested in it.
        defaults: what a setting meant where it is not recorded, by its dotted name.

    Raises:
        ValueError: `what`, a line for every setting that differs with what was expected and what came, `advice`.
    """
    known, asked = flat_settings(before), flat_settings(now)
    meant = flat_settings(defaults or {})
    differing = [
        name
        for name in sorted(known.keys() | asked.keys())
        if known.get(name, meant.get(name)) != asked.get(name, meant.get(name))
        and not any(f"{name}.".startswith(f"{prefix}.") for prefix in free)
    ]
    if differing:
        lines = [
            f"{name}: expected {_shown(known, name, meant)}; got {_shown(asked, name, meant)}" for name in differing
        ]
        raise ValueError("\n".join([f"{what}:", *(f"  {line}" for line in lines), advice]))


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names, values as by `json_safe`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = json_safe(value)
    return flat


def json_safe(value: Any) -> Any:
    """NaN and infinity as null (JSON has neither); tuples as lists, paths and names of mappings as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _shown(settings: Mapping[str, Any], name: str, meant: Mapping[str, Any]) -> str:
    if name in settings:
        return repr(settings[name])
    return f"{meant[name]!r} (not recorded)" if name in meant else "nothing (not recorded)"
