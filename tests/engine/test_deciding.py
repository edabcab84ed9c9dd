"""Decisions are carried out where they end: the planner is reached through `deciding()` alone, and no block of it waits."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paramstore_testkit.source import modules, tree

SERVICE = ("paramstore.engine", "paramstore.upkeep", "paramstore.daemon")
PLANNER, KEEPERS = "paramstore.engine.planner", frozenset({"paramstore.engine.transfers.transfers", "paramstore.daemon.assembly"})
"""KEEPERS: who makes the planner, and who hands it out."""


def test_nobody_keeps_the_planner_or_carries_out_by_hand() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, parsed in service()
        if name not in KEEPERS
        for node in ast.walk(parsed)
        if isinstance(node, ast.Attribute) and node.attr in {"_planner", "planner", "carry_out"}
    ]
    assert found == []


def test_no_decision_waits_and_none_is_made_after_its_block() -> None:
    blocks = [(name, function, block) for name, parsed in service() for function, block in deciding_in(parsed)]
    nodes = (node for _, parsed in service() for node in ast.walk(parsed))
    calls = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "deciding"]
    assert len(calls) == len(blocks) > 0, "deciding() stands in a `with` of its own, `as planner`"
    assert [f"{name}:{block.lineno}" for name, function, block in blocks for _ in faults_of(function, block)] == []


def test_an_await_and_a_later_use_are_found() -> None:
    source = """
async def late(self):
    with self._transfers.deciding() as planner:
        planner.a()
    planner.b()

async def waits(self):
    with self._transfers.deciding() as planner:
        await planner.a()

async def keeps(self):
    with self._transfers.deciding() as planner:
        working = planner.working
    await x()
    working.b()

async def hands_on(self):
    with self._transfers.deciding() as planner:
        later(planner)

async def closes_over(self):
    with self._transfers.deciding() as planner:
        def later():
            planner.a()
    return later

async def well(self):
    with self._transfers.deciding() as planner:
        planner.a()
    await x()
    with self._transfers.deciding() as planner:
        planner.b()
"""
    found = {function.name: [*faults_of(function, block)] for function, block in deciding_in(ast.parse(source))}
    assert [name for name, faults in found.items() if faults] == ["late", "waits", "keeps", "hands_on", "closes_over"]


def service() -> Iterator[tuple[str, ast.Module]]:
    """Modules of the daemon's side that use the planner."""
    yield from ((name, tree(path)) for name, path in modules() if name.startswith(SERVICE) and not name.startswith(PLANNER))


def deciding_in(parsed: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, ast.With]]:
    """Every block of `deciding()`, with the innermost function around it."""
    for function in (node for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        for node in _own(function):
            if isinstance(node, ast.With) and any(_is_deciding(item) for item in node.items):
                yield function, node


def faults_of(function: ast.FunctionDef | ast.AsyncFunctionDef, block: ast.With) -> Iterator[ast.AST]:
    """Waits inside of the block, uses of the planner but to call it or to look something up, and uses outside of any block."""
    yield from (node for node in ast.walk(block) if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith | ast.Yield))
    called = {id(node.func) for node in ast.walk(block) if isinstance(node, ast.Call)}
    roots = {id(_root(node)) for node in ast.walk(block) if isinstance(node, ast.Attribute) and id(node) in called}
    later = (inner for inner in ast.walk(block) if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))
    closed = {id(node) for inner in later for node in ast.walk(inner)}
    for node in ast.walk(block):
        is_use = isinstance(node, ast.Name) and node.id == "planner" and isinstance(node.ctx, ast.Load)
        if is_use and (id(node) not in roots or id(node) in closed):
            yield node
    inside = {id(node) for _, other in deciding_in(ast.Module([function], [])) for node in ast.walk(other)}
    yield from (node for node in _own(function) if isinstance(node, ast.Name) and node.id == "planner" and id(node) not in inside)


def _is_deciding(item: ast.withitem) -> bool:
    is_named = isinstance(item.optional_vars, ast.Name) and item.optional_vars.id == "planner"
    return is_named and ast.unparse(item.context_expr).endswith(".deciding()")


def _root(node: ast.expr) -> ast.expr:
    """What an attribute of an attribute is looked up in."""
    return _root(node.value) if isinstance(node, ast.Attribute) else node


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function but those of functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _own(child)
