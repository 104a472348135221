"""The core stays light: at module level it imports the standard library, grpcio, protobuf and numpy, and itself.

import-linter cannot tell an import at module level from one inside a function, so this test reads the sources.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import worldserve

ROOT = Path(worldserve.__file__).parent
ALLOWED = {"worldserve", "grpc", "google.protobuf", "numpy"}
# A process that serves has the extra `serving`.
ALLOWED_IN_SERVING = ALLOWED | {"grpc_health", "grpc_reflection", "grpc_status", "google.rpc", "prometheus_client"}
# An adapter needs the library whose words it speaks, and is imported by no other module of the core.
ALLOWED_IN_ADAPTERS = {
    "dm_env_rpc_bridge": {"dm_env_rpc", "google.rpc"},
    "dm_environment": {"dm_env"},
    "gymnasium_env": {"gymnasium"},
    "rlinf_backend": {"torch"},
    "rlinf_env": {"gymnasium", "torch"},
    "stable_baselines3": {"gymnasium", "stable_baselines3"},
    "torchrl_env": {"tensordict", "torch", "torchrl"},
    "vector_env": {"gymnasium"},
}
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def imports_at_module_level(tree: ast.AST) -> Iterator[str]:
    """Yields the modules that importing this source imports: not those in functions, nor under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                continue
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case _:
                yield from imports_at_module_level(node)


def is_allowed(module: str, allowed: set[str]) -> bool:
    """Tells whether a module is of the standard library or below one of the allowed packages."""
    return module.partition(".")[0] in sys.stdlib_module_names or any(
        f"{module}.".startswith(f"{package}.") for package in allowed
    )


@pytest.mark.parametrize("path", MODULES)
def test_module_imports_only_what_a_client_installs(path: str) -> None:
    allowed = ALLOWED_IN_SERVING if path.startswith(("serving/", "probing/", "conformance/")) else ALLOWED
    if path.startswith("conformance/"):  # a pytest plugin and its tests
        allowed = allowed | {"pytest"}
    if path.startswith("adapters/"):
        allowed = ALLOWED | ALLOWED_IN_ADAPTERS.get(Path(path).stem, set())
    tree = ast.parse((ROOT / path).read_bytes())
    heavy = sorted(module for module in set(imports_at_module_level(tree)) if not is_allowed(module, allowed))
    assert heavy == [], f"import these inside the functions of worldserve/{path} that use them"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", ["torch"]),
        ("from google.protobuf import message", ["google.protobuf.message"]),
        ("from . import sibling", []),
        ("def f():\n    import torch", []),
        ("if TYPE_CHECKING:\n    import torch", []),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", ["torch"]),
        ("class A:\n    import torch", ["torch"]),
    ],
)
def test_the_reader_of_imports(source: str, expected: list[str]) -> None:
    assert list(imports_at_module_level(ast.parse(source))) == expected
