"""card.md of a reward model: what the weights are, from what, and how good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def card(figures: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """card.md: what the weights are, from what, how good."""
    chosen, held_out = figures["validation"], figures.get("held_out")
    lines = [
        "# Reward model: frame classifier",
        "",
        "Reads single 96x128 RGB frames. An episode is read as success when the highest probability of frames 51-200",
        f"is at least {chosen['value']:.6f}.",
        "",
        f"- command: `{_command(figures, defaults)}`",
        f"- seed: {figures['seed']}; worldserve {figures['worldserve_version']}; {figures['cpu_s']} CPU-seconds",
    ]
    lines += [
        f"- data: {entry['directory']}: {entry['episodes']} episodes, {entry['successes']} successes "
        f"({', '.join(entry['policies'])}), sha256 {entry['sha256']}"
        for entry in figures["data"]
    ]
    lines += [
        f"- trained on {figures['train_episodes']} episodes; threshold chosen on {chosen['failures']} failures and "
        f"{chosen['successes']} successes of other initial states: failures read as success "
        f"{chosen['fake_success']:.3f}, recall {chosen['recall']:.3f}",
    ]
    if rates := figures.get("read_as_success"):
        text = ", ".join(f"{name.replace('_', ' ')}: {rate:.2f}" for name, rate in rates.items())
        lines += [
            "- mixtures of a validation success with a failure of the same moment (share of success left in it) and",
            f"  successes smeared over 2 or 4 pixels, read as success: {text}. Trained to refuse what is mostly faded",
            "  (share at most 0.55), as a world model draws it where it cannot decide; see `ghosts.py`.",
        ]
    if held_out:
        for name, text in (("fake_success", "failures read as success"), ("recall", "recall")):
            rate = held_out[name]
            if rate:
                lines.append(
                    f"- held out ({', '.join(entry['directory'] for entry in held_out['data'])}): {text} "
                    f"{rate['value']:.3f} [{rate['low']:.3f}, {rate['high']:.3f}] ({rate['count']} of {rate['total']}; "
                    f"{rate['confidence']:.0%} Wilson interval)"
                )
    return "\n".join(lines) + "\n"


def _command(figures: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The command that fits these weights again: the data, and every setting that is not its default."""
    words = ["worldserve fit-reward --data", *(entry["directory"] for entry in figures["data"])]
    for name, value in figures["settings"].items():
        nested = isinstance(value, Mapping)
        pairs = {f"{name}.{k}": (v, defaults[name].get(k)) for k, v in value.items()} if nested else {}
        for flag, (given, default) in (pairs or {name: (value, defaults.get(name))}).items():
            if _listed(given) != _listed(default):
                text = " ".join(map(str, given)) if isinstance(given, list | tuple) else str(given)
                words.append(f"--{flag.replace('_', '-')} {text}")
    return " ".join(words)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
