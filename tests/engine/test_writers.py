"""The planner alone writes the engine's tables: nobody else assigns, deletes or changes what a table declares.

It goes by names: whoever writes an attribute of the same name of another object than its own is taken for a writer of the table.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paramstore_testkit.source import modules, tree

TABLES, PLANNER = "paramstore.engine.tables", "paramstore.engine.planner"
LOOKED_AT = ("paramstore.engine", "paramstore.upkeep", "paramstore.daemon")
COUNTERS = "paramstore.engine.tables.counters"
"""What is counted for people, by whoever carries something out."""
OTHERS = frozenset({"stats", "transfer", "traffic", "scrub", "advance", "advances", "held"})
"""Names of values that are of other classes, some of whose attributes are called as those of tables."""
CHANGING = frozenset({
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "extendleft", "insert", "intersection_update",
    "pop", "popitem", "popleft", "remove", "setdefault", "sort", "update",
})  # fmt: skip


def test_only_the_planner_writes_tables() -> None:
    tables = {module: path for module, path in modules() if module.startswith(TABLES) and module != COUNTERS}
    declared = {name for path in tables.values() for name in declared_in(tree(path))} - {"stats", "progress"}
    found = [
        f"{module}:{line} {name}"
        for module, path in modules()
        if module.startswith(LOOKED_AT) and not module.startswith((TABLES, PLANNER))
        for line, name in written_in(tree(path), declared)
    ]
    assert found == []


def test_every_way_to_write_is_found() -> None:
    source = """
table.a = 1
table.b += 1
table.c[0] = 1
del table.d[0]
table.e.append(1)
table.f[0].g.clear()
self.a = 1
transfer.a = 1
table.a.index(1)
x, table.h = 1, 2
table.stats.a += 1
"""
    names = {*"abcdefgh"}
    assert [name for _, name in written_in(ast.parse(source), names)] == ["a", "b", "c", "d", "e", "g", "h"]


def declared_in(module: ast.Module) -> Iterator[str]:
    """Names of the attributes of all classes of a module."""
    for cls in (node for node in ast.walk(module) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(cls):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
                yield node.attr


def written_in(module: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        target = _written(node)
        if target is not None and target.attr in names and _owner(target) not in OTHERS | {"self"}:
            yield target.lineno, target.attr


def _owner(target: ast.Attribute) -> str | None:
    """Name of the value whose attribute is written, or of the mapping that it is looked up in."""
    value = target.value.value if isinstance(target.value, ast.Subscript) else target.value
    return value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else None


def _written(node: ast.AST) -> ast.Attribute | None:
    """The attribute that `node` writes, itself or what it holds."""
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return node
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Attribute):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
        return node.func.value if isinstance(node.func.value, ast.Attribute) else None
    return None
