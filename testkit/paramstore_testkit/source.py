"""The project's own modules, by name and parsed, for the tests of its shape."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = {
    "paramstore": ROOT / "paramstore", "paramstore_client": ROOT / "client/paramstore_client",
    "paramstore_native": ROOT / "native/paramstore_native",
}  # fmt: skip
OURS = {"paramstore_testkit": ROOT / "testkit/paramstore_testkit", "paramstore_bench": ROOT / "bench/paramstore_bench"}
PACKAGES = PRODUCT | OURS

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name and file of every module; a folder's own name is that of its `__init__`."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            yield ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"), path


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text())


def functions() -> Iterator[tuple[str, Function]]:
    """Every function and method, inner ones too, by module and name."""
    for module, path in modules():
        yield from ((f"{module}.{node.name}", node) for node in ast.walk(tree(path)) if isinstance(node, Function))


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Every class, by module and name."""
    for module, path in modules():
        yield from ((f"{module}.{node.name}", node) for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef))


@cache
def imported_from(module: str) -> dict[str, str]:
    """For each name that a module imports from another: where it comes from, as module and name."""
    (path,) = (path for name, path in modules() if name == module)
    found = (node for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in found for alias in node.names}
