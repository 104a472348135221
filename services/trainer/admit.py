"""May this world model be trained in, for this policy? One verdict from the measures of trust: `worldserve admit`.

    worldserve admit --policy runs/ppo/policy --fidelity runs/fidelity --mismatch runs/mismatch \\
        --forks runs/forks-train --forks runs/forks-unseen --gates gates/mini.yaml --out runs/admit/verdict.json

Every gate of the file must be met, and all measures must be of one world model, served with the same settings, one
reward, one interface and the same policy. A figure that was not measured refuses. Exit status: 0 admitted, 1 refused,
2 unusable input.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from services.trainer.gates import FIGURES, Gates, judge, load_gates
from services.trainer.run_record import write_json
from worldserve.files import file_sha256
from worldserve.version import __version__

SUMMARY = "Gates over fidelity, mismatch and forks: may a world model be trained in?"
SPLITS = ("train", "unseen")
_SERVERS = "--target WORLD_MODEL --reference SIMULATOR"
COMMANDS = {
    "fidelity": f"worldserve fidelity DATA {_SERVERS} --reward REWARD --out DIR",
    "mismatch": f"worldserve mismatch --policy POLICY --baseline weights/policy-sft {_SERVERS} --out DIR",
    "forks.train": f"worldserve forks DATA --split train --fidelity DIR {_SERVERS} --out DIR",
    "forks.unseen": f"worldserve forks DATA --split unseen --fidelity DIR {_SERVERS} --out DIR",
    "history": "python -m services.wm_server.history_check --weights WEIGHTS --data DATA --reward REWARD --out FILE",
}
OPTIONS = {measure: f"--{measure.partition('.')[0]}" for measure in COMMANDS}
# What all measures must say the same about, and what it is called. A history check may leave out all but the weights.
IDENTITY = {
    "target_weights_sha256": "world model weights",
    "reward_provenance": "reward model",
    "interface": "interface",
}
# What may differ (threads, versions, device: not what is drawn), and is said.
NOTED = {"target_provenance": "target servers", "reference_provenance": "reference servers"}


@dataclass(frozen=True)
class AdmitConfig:
    """One verdict from the measures of trust."""

    gates: Path = Path("gates/mini.yaml")
    """YAML file of the gates, written before the measures."""
    policy: Path | None = None
    """Directory of the policy; the mismatch must be its own. A gate on the mismatch is not met without it."""
    fidelity: Path | None = None
    """Directory of `worldserve fidelity`."""
    mismatch: Path | None = None
    """Directory of `worldserve mismatch`."""
    forks: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(metavar="PATH")] = ()
    """Directory of `worldserve forks`; once a split."""
    history: Path | None = None
    """JSON file of the history check."""
    out: Path = Path("runs/admit/verdict.json")
    """Where the verdict is written."""


@dataclass(frozen=True)
class Measure:
    """A result that was read: `result` as JSON gives it, `sha256` of its file."""

    path: Path
    sha256: str
    result: Mapping[str, Any]

    @property
    def identity(self) -> Mapping[str, Any]:
        """What was measured. A history check has the reward as an object of its own."""
        found: Mapping[str, Any] = self.result["identity"]
        reward = found.get("reward")
        fingerprint = reward.get("provenance_fingerprint") if isinstance(reward, Mapping) else None
        return {"reward_provenance": fingerprint, **found} if fingerprint else found

    def drawn(self, names: Collection[str]) -> dict[str, str] | None:
        """The target's facts that change what is drawn; None where it states none.

        A history check has those of `names` that it knows beside its other facts, as numbers and lists.
        """
        found = self.result["identity"].get("target_drawn")
        if isinstance(found, Mapping):
            return {name: str(value) for name, value in found.items()}
        return {name: _as_fact(self.identity[name]) for name in names if name in self.identity} or None


def _as_fact(value: Any) -> str:
    """A JSON value as `serve-wm` states it: lists by commas, true and false in small letters."""
    if isinstance(value, list):
        return ",".join(_as_fact(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_measure(name: str, path: Path) -> Measure:
    """A result by its directory (or file). Raises FileNotFoundError or ValueError, naming file and command."""
    file = path / "result.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{OPTIONS[name][2:]}: expected the result of a finished measure; there is no {file}. `{COMMANDS[name]}` "
            "writes it."
        )
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{OPTIONS[name][2:]}: expected JSON in {file}; {error}") from error
    if not isinstance(result, dict) or not isinstance(result.get("identity"), dict):
        raise ValueError(
            f"{OPTIONS[name][2:]}: expected the result of `{COMMANDS[name]}`, with an identity; {file} has none."
        )
    return Measure(file, file_sha256(file), result)


def read_measures(config: AdmitConfig) -> dict[str, Measure]:
    """Every measure that was given, by name; forks by their split."""
    found = {}
    for name, path in (("fidelity", config.fidelity), ("mismatch", config.mismatch), ("history", config.history)):
        if path is not None:
            found[name] = read_measure(name, path)
    for path in config.forks:
        measure = read_measure("forks.unseen", path)
        split = measure.result.get("split")
        if split not in SPLITS:
            raise ValueError(f"forks: expected a split of {' or '.join(SPLITS)} in {measure.path}; got {split!r}")
        if f"forks.{split}" in found:
            raise ValueError(
                f"forks: expected one directory a split; {path} is {split} again. Give --forks once for it."
            )
        found[f"forks.{split}"] = measure
    return found


def identity_reasons(measures: Mapping[str, Measure], policy: Path | None) -> list[str]:
    """Why the measures do not belong together; nothing where they do."""
    reasons = []
    for name, meaning in IDENTITY.items():
        said = {measure: str(found.identity.get(name) or "") for measure, found in measures.items()}
        silent = [m for m in said if not said[m] and (m != "history" or name == "target_weights_sha256")]
        if silent:
            reasons.append(f"{meaning}: {', '.join(silent)} does not say of which ({name}); measure it again")
        if len({value for value in said.values() if value}) > 1:
            listed = ", ".join(f"{measure} {value[:12]}" for measure, value in said.items() if value)
            reasons.append(f"{meaning}: expected one ({name}); got {listed}. Measure them on one")
    unfinished = [measure for measure, found in measures.items() if found.result.get("failed")]
    reasons += [f"{name}: episodes failed; the same command goes on with these" for name in unfinished]
    if policy is not None and "mismatch" in measures:
        wanted, got = policy_sha256(policy), measures["mismatch"].identity.get("policy_model_sha256")
        if got != wanted:
            reasons.append(
                f"policy: expected the mismatch of {policy} ({wanted[:12]}); got that of {str(got)[:12]}. Measure it "
                f"with `{COMMANDS['mismatch'].replace('POLICY', str(policy), 1)}`"
            )
    return reasons


def drawn_reasons(measures: Mapping[str, Measure]) -> list[str]:
    """Why the measures are of a world model that was served otherwise: the same weights then draw other frames."""
    stated = {name: found.result["identity"].get("target_drawn") for name, found in measures.items()}
    names = sorted({name for found in stated.values() if isinstance(found, Mapping) for name in found})
    drawn = {measure: found.drawn(names) for measure, found in measures.items()}
    silent = [measure for measure, found in drawn.items() if found is None and measure != "history"]
    reasons = []
    if silent:
        reasons.append(
            f"drawing: {', '.join(silent)} does not say with which settings (target_drawn); measure it again"
        )
    for name in names:
        # A server states all it has: what it leaves out is "" there. A history check is asked for what it states.
        said = {m: found.get(name, "") for m, found in drawn.items() if found and (m != "history" or name in found)}
        if len(set(said.values())) > 1:
            listed = ", ".join(f"{measure} {value[:60] or 'none'}" for measure, value in said.items())
            reasons.append(f"drawing: expected one {name}; got {listed}. Measure them on one server")
    return reasons


def floor_reasons(measures: Mapping[str, Measure]) -> list[str]:
    """Why a floor is not that of half a pixel: larger shifts flip more outcomes, and hide more fake successes."""
    from services.trainer.shifts import HALF_PIXEL_MM

    return [
        f"{name}: expected a floor at shifts of half a pixel, {HALF_PIXEL_MM} mm (shifts_mm); got "
        f"{found.result.get('shifts_mm')}. Measure it again with the default --shift-x-mm and --shift-y-mm"
        for name, found in measures.items()
        if name.startswith("forks.") and found.result.get("shifts_mm") != HALF_PIXEL_MM
    ]


def notes(measures: Mapping[str, Measure]) -> list[str]:
    """What does not refuse, but a reader should know."""
    found = []
    for name, meaning in NOTED.items():
        said = {measure: str(m.identity[name]) for measure, m in measures.items() if m.identity.get(name)}
        if len(set(said.values())) > 1:
            listed = ", ".join(f"{measure} {value[:12]}" for measure, value in said.items())
            found.append(f"{meaning} differ in provenance ({listed}): settings, versions or reward of the servers")
    return found


def vacuous(figure: str, measures: Mapping[str, Measure], policy: Path | None) -> str:
    """Why a figure of the mismatch says nothing about the policy, whatever its number; "" where it does."""
    if FIGURES[figure].measure != "mismatch":
        return ""
    reasons = []
    if policy is None:
        reasons.append("no policy was named that it is the mismatch of; give --policy")
    said = measures["mismatch"].identity if "mismatch" in measures else {}
    if figure == "mismatch.excess" and said and said.get("policy_model_sha256") == said.get("baseline_model_sha256"):
        reasons.append("policy and baseline are the same weights, whose excess is 0 whatever the world model draws")
    return "; ".join(reasons)


def policy_sha256(directory: Path) -> str:
    """Of a policy's weights."""
    from services.trainer.policies import find_policy

    file = find_policy(directory) / "model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"policy: expected the directory of a policy; there is no {file}")
    return file_sha256(file)


def verdict(gates: Gates, measures: Mapping[str, Measure], policy: Path | None) -> dict[str, Any]:
    """The whole verdict, as it is written: admitted, reasons, every gate, and of what it was made."""
    judgements = []
    for gate in gates.gates:
        name = FIGURES[gate.figure].measure
        result = measures[name].result if name in measures else None
        found = judge(gate, result, COMMANDS[name], gates.confidence)
        why = vacuous(gate.figure, measures, policy)
        if why and found.outcome != "missing":
            found = dataclasses.replace(found, outcome="fail", why="; ".join(filter(None, (found.why, why))))
        judgements.append(found)
    reasons = [f"{j.gate.figure}: {j.why}" for j in judgements if j.outcome != "pass"]
    reasons += identity_reasons(measures, policy) + drawn_reasons(measures) + floor_reasons(measures)
    return {
        "admitted": not reasons,
        "reasons": reasons,
        "notes": notes(measures),
        "gates": [{"figure": j.gate.figure, "bound": j.gate.bound, **dataclasses.asdict(j)} for j in judgements],
        "gates_file": {"path": str(gates.path), "sha256": gates.sha256, "confidence": gates.confidence},
        "policy": {"path": str(policy), "model_sha256": policy_sha256(policy)} if policy else None,
        "measures": {
            name: {"path": str(found.path), "sha256": found.sha256, "identity": found.identity}
            for name, found in measures.items()
        },
        "version": __version__,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve admit`: exit status 0 admitted, 1 refused, 2 unusable input."""
    config = tyro.cli(AdmitConfig, args=argv, prog="worldserve admit", description=__doc__)
    try:
        gates = load_gates(config.gates)
        found = verdict(gates, read_measures(config), config.policy)
        write_json(config.out, found)
    except (ValueError, OSError) as error:
        print(f"worldserve admit: {error}", file=sys.stderr)
        return 2
    _show(found)
    return 0 if found["admitted"] else 1


def _show(found: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, 110))  # figures are read whole, also in an 80-column log
    table = Table(title=f"gates of {found['gates_file']['path']}", title_justify="left", box=box.SIMPLE)
    for name in ("figure", "measured", "episodes", "states", "gate", ""):
        table.add_column(name, no_wrap=True)
    for row in found["gates"]:
        known = row["value"] is not None
        interval = f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]" if known else "-"
        episodes, states = (str(row[name]) if row[name] is not None else "-" for name in ("count", "states"))
        gate = f"{row['gate']['read']} {row['bound']}"
        table.add_row(row["figure"], interval, episodes, states, gate, row["outcome"])
    console.print(table)
    for note in found["notes"]:
        print(f"note: {note}")
    if found["admitted"]:
        print("ADMITTED: every gate is met")
    else:
        print(f"REFUSED for {len(found['reasons'])} reason{'s' if len(found['reasons']) > 1 else ''}:")
        for reason in found["reasons"]:
            print(f"  {reason}")
