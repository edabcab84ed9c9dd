"""The project's own modules, by name and parsed, for the tests of its shape."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = {
    "paramstore": ROOT / "paramstore", "paramstore_client": ROOT / "client/paramstore_client",
    "paramstore_native": ROOT / "native/paramstore_native",
}  # fmt: skip
OURS = {"paramstore_testkit": ROOT / "testkit/paramstore_testkit", "paramstore_bench": ROOT / "bench/paramstore_bench"}
PACKAGES = PRODUCT | OURS
TESTED = {
    "client": "paramstore_client", "native": "paramstore_native", "testkit": "paramstore_testkit",
    "bench_scripts": "paramstore_bench",
}  # fmt: skip
"""Packages whose tests have a folder of `tests` to themselves. Those of `paramstore` lie in `tests` as its modules in it."""

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


def imported(parsed: ast.Module, files: Container[str]) -> Iterator[str]:
    """Those of the modules `files` that a file imports, for its types and late too."""
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module in files:
            assert node.level == 0, f"a relative import of {node.module}"
            inner = {f"{node.module}.{name.name}" for name in node.names}
            yield from (name if name in files else node.module for name in inner)


def mirrored() -> Iterator[tuple[str, Path]]:
    """Name of the module that each test module would be the mirror of by its place, and its file."""
    tests = ROOT / "tests"
    for path in sorted(tests.rglob("test_*.py")):
        *folders, file = path.relative_to(tests).with_suffix("").parts
        package = [TESTED[folders[0]], *folders[1:]] if folders and folders[0] in TESTED else ["paramstore", *folders]
        yield ".".join((*package, file.removeprefix("test_"))), path
