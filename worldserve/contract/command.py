"""Show a server's contract, or compare two: `worldserve contract show TARGET`, `worldserve contract diff A B`.

A, B and TARGET are HOST:PORT of a simulator, world model or reward server, or the path of a contract's YAML file.

    worldserve contract show 127.0.0.1:50051
    worldserve contract diff 127.0.0.1:50051 127.0.0.1:50052
    worldserve contract diff runs/rollouts/meta/contracts/x.yaml 127.0.0.1:50051 --provenance
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from worldserve.contract import Contract, contract_to_mapping, differences, fingerprint, from_yaml, to_yaml

SUMMARY = "Show the contract of a server, or compare two contracts."


def read_contract(source: str, timeout_s: float) -> Contract:
    """The contract of a server or of a YAML file."""
    from worldserve.client import EnvironmentClient, RewardClient, WrongServiceError

    if Path(source).is_file():
        try:
            return from_yaml(Path(source).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    if ":" not in source:
        raise ValueError(f"{source}: expected HOST:PORT or the path of a contract's YAML file; there is no such file")
    try:
        with EnvironmentClient(source, timeout_s=timeout_s) as client:
            return client.get_contract()
    except WrongServiceError:
        pass
    try:
        with RewardClient(source, timeout_s=timeout_s) as reward:
            return reward.get_contract()
    except WrongServiceError:
        raise ValueError(
            f"{source}: expected a server of worldserve; another kind of server is running there"
        ) from None


def _show(arguments: argparse.Namespace) -> int:
    contract = read_contract(arguments.target, arguments.timeout)
    prints = {"interface": fingerprint(contract.interface), "provenance": fingerprint(contract.provenance)}
    if arguments.json:
        print(json.dumps({"fingerprints": prints, **contract_to_mapping(contract)}, indent=2, ensure_ascii=False))
    else:
        print(f"# interface  {prints['interface']}\n# provenance {prints['provenance']}\n{to_yaml(contract)}", end="")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    first, second = (read_contract(source, arguments.timeout) for source in (arguments.first, arguments.second))
    found = differences(first.interface, second.interface)
    if arguments.provenance:
        found += differences(first.provenance, second.provenance)
    for difference in found:
        print(difference)
    if not found:
        print(f"equal: {fingerprint(first.interface)}")
    return int(bool(found))


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve contract`: exit status 1 when `diff` finds a difference, 2 when a contract cannot be read.

    Raises:
        BrokenPipeError: the reader of the output went away, which `worldserve.cli` handles.
    """
    parser = argparse.ArgumentParser(
        "worldserve contract", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="show|diff")
    show = commands.add_parser("show", help="print a contract as YAML, fingerprints first")
    show.add_argument("target", help="HOST:PORT or YAML file")
    show.add_argument("--json", action="store_true", help="JSON instead of YAML")
    show.set_defaults(run=_show)
    diff = commands.add_parser("diff", help="print the fields in which two interfaces differ")
    diff.add_argument("first", help="HOST:PORT or YAML file: expected")
    diff.add_argument("second", help="HOST:PORT or YAML file: got")
    diff.add_argument("--provenance", action="store_true", help="compare provenance too")
    diff.set_defaults(run=_diff)
    for command in (show, diff):
        command.add_argument(
            "--timeout", type=float, default=60.0, metavar="SECONDS",
            help="to wait for a server, which may still be starting (default: %(default)g)",
        )  # fmt: skip
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        print(f"worldserve contract: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "yaml":
            raise
        advice = "`contract show HOST:PORT --json` needs none; for YAML run pip install pyyaml"
        print(
            f"worldserve contract: YAML needs the Python package PyYAML, which is not installed. {advice}",
            file=sys.stderr,
        )
        return 2
