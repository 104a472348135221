"""Writes docs/errors.md from the source: every error of an item, and every exception that a caller may meet.

    python scripts/errors_table.py            # writes docs/errors.md
    python scripts/errors_table.py --check    # exit status 1 where the file is not what the source says

A test compares the file with the source, so that a text that changes is a change of the file, seen in review.
"""

from __future__ import annotations

import ast
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "errors.md"
PACKAGES = ("worldserve", "services")
FIELDS = ("code", "reason", "name", "expected", "got", "advice")
INVALID_FIELDS = ("name", "expected", "got", "advice", "reason")
HEAD = """# Errors

Written by `scripts/errors_table.py` from the source, and compared with it by a test
(`tests/scripts/test_errors_table.py`); change the texts there. In a text, `{...}` stands for what is filled in.

## Errors of one item

An item of a batch fails alone, with a status, a reason that never changes its meaning, the field, what was expected,
what came, and what to do. A whole call that fails carries the same as `google.rpc.Status` with ErrorInfo. UNAVAILABLE
and RESOURCE_EXHAUSTED say when to come again; every call of the contract is safe to repeat.

| status | reason | field | expected | got | what to do |
|---|---|---|---|---|---|
"""
EXCEPTIONS_HEAD = """
## Exceptions in Python

| exception | raised where | meaning | what to do |
|---|---|---|---|
"""


@dataclass(frozen=True, order=True)
class Row:
    """One error."""

    code: str
    reason: str
    name: str
    expected: str
    got: str
    advice: str


def text_of(node: ast.expr | None) -> str:
    """An argument as the table has it: its text, `{...}` for what is filled in; both branches of a condition."""
    match node:
        case None:
            return ""
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=values):
            return "".join(text_of(value) for value in values)
        case ast.FormattedValue(value=value):
            return "{" + ast.unparse(value) + "}"
        case ast.IfExp(body=body, orelse=otherwise):
            return f"{text_of(body)} / {text_of(otherwise)}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
        case ast.BoolOp(values=values):
            return " or ".join(text_of(value) for value in values)
        case _:
            return "{" + ast.unparse(node) + "}"


def arguments_of(call: ast.Call, names: tuple[str, ...]) -> dict[str, str]:
    """A call's arguments by name, as text."""
    found = {name: text_of(value) for name, value in zip(names, call.args, strict=False)}
    return found | {word.arg: text_of(word.value) for word in call.keywords if word.arg in names}


@functools.cache
def sources() -> tuple[tuple[Path, ast.Module], ...]:
    """Every module of the packages, in order."""
    return tuple(
        (path, ast.parse(path.read_text(encoding="utf-8")))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not {"generated", "conformance"} & set(path.parts)
    )


def item_errors() -> list[Row]:
    """Every error of an item that is made somewhere, each text once."""
    rows: set[Row] = set()
    for path, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            if called == "ItemError" and len(node.args) >= 2:
                given = arguments_of(node, FIELDS)
                if not given["code"].startswith("{"):
                    rows.add(Row(*(given.get(name, "") for name in FIELDS)))
            elif called == "invalid" and path.name != "errors.py" and len(node.args) >= 4:
                given = {"reason": "INVALID_FIELD"} | arguments_of(node, INVALID_FIELDS)
                rows.add(Row("INVALID_ARGUMENT", *(given[name] for name in FIELDS[1:])))
    return sorted(rows)


def exceptions() -> list[tuple[str, str, str, str]]:
    """Every public exception class: name, module, and its docstring's first line and advice ("What to do: ...")."""
    found = []
    for path, tree in sources():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and node.bases and node.name[0] != "_":
                said = ast.get_docstring(node) or ""
                advice = " ".join(said.partition("What to do:")[2].split())
                found.append((node.name, module, said.partition("\n")[0], advice))
    return sorted(found)


def cell(text: str) -> str:
    """A text in a table's cell."""
    return " ".join(text.replace("|", "\\|").split())


def render() -> str:
    """The whole file."""
    rows = [
        f"| {row.code} | `{row.reason}` | {' | '.join(map(cell, (row.name, row.expected, row.got, row.advice)))} |"
        for row in item_errors()
        if not row.reason.startswith("{")
    ]
    raised = [
        f"| `{name}` | `{module}` | {cell(meaning)} | {cell(advice)} |"
        for name, module, meaning, advice in exceptions()
    ]
    return HEAD + "\n".join(rows) + "\n" + EXCEPTIONS_HEAD + "\n".join(raised) + "\n"


def main() -> int:
    """Writes the file, or checks it."""
    text = render()
    if "--check" in sys.argv[1:]:
        fresh = TABLE.exists() and TABLE.read_text(encoding="utf-8") == text
        if not fresh:
            print("docs/errors.md: not what the source says; run python scripts/errors_table.py", file=sys.stderr)
        return int(not fresh)
    TABLE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
