"""The planner alone writes the engine's tables: nobody else assigns, deletes or changes what a table declares, or calls a method of
a table that does.

It goes by names: whoever writes an attribute, or calls a method, of the same name of another object than its own is taken for a
writer of the table.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator
from functools import cache

import pytest

from paramstore_testkit.source import Function, modules, tree

TABLES, PLANNER = "paramstore.engine.tables", "paramstore.engine.planner"
LOOKED_AT = ("paramstore.engine", "paramstore.upkeep", "paramstore.daemon")
COUNTERS = "paramstore.engine.tables.counters"
"""What is counted for people, by whoever carries something out."""
OTHERS = {
    "stats": "counters, which whoever carries something out counts in", "transfer": "`Transfer`", "scrub": "`Scrub`",
    "advance": "`Advance`", "advances": "`Advances`", "held": "a held request",
}  # fmt: skip
"""Names of values that are of other classes, some of whose attributes are called as those of tables, and what they are."""
OTHERS_CALLED = {
    "collective": "its rules are pure and stay with the table that they change; `Gathering`, which has it, asks it alone",
    "gathering": "`Gathering`, whose calls are named as those of its `Collective`", "_gatherings": "gatherings by their group",
    "_ranks": "`Ranks`", "log": "`TransferLog`", "_note_slots": "`NoteSlots`", "StoreLock": "a lock file", "thread": "a thread",
    "_extents": "`Extents`",
}  # fmt: skip
"""Names of values whose methods may be called that are called as methods of tables that write, and why."""
CHANGING = frozenset({
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "extendleft", "insert", "intersection_update",
    "pop", "popitem", "popleft", "remove", "setdefault", "sort", "update",
})  # fmt: skip
Found = Iterator[tuple[int, str]]
"""Line and name of each place."""


def test_only_the_planner_writes_tables() -> None:
    assert outside(lambda module: written_in(module, declared(), OTHERS)) == []


def test_only_the_planner_calls_methods_of_tables_that_write() -> None:
    assert outside(lambda module: called_in(module, writing(), OTHERS_CALLED)) == []


@pytest.mark.parametrize("name", OTHERS)
def test_every_value_that_is_no_table_is_written_somewhere(name: str) -> None:
    assert outside(lambda module: written_in(module, declared(), OTHERS.keys() - {name})) != [], "it need not be exempted any more"


@pytest.mark.parametrize("name", OTHERS_CALLED)
def test_every_value_whose_methods_may_be_called_is_called_somewhere(name: str) -> None:
    assert outside(lambda module: called_in(module, writing(), OTHERS_CALLED.keys() - {name})) != [], "it need not be exempted"


def outside(look: Callable[[ast.Module], Found]) -> list[str]:
    """What `look` finds in modules that are no table's and not the planner's."""
    return [
        f"{module}:{line} {name}"
        for module, path in modules()
        if module.startswith(LOOKED_AT) and not module.startswith((TABLES, PLANNER))
        for line, name in look(tree(path))
    ]


def tables() -> Iterator[ast.Module]:
    return (tree(path) for module, path in modules() if module.startswith(TABLES) and module != COUNTERS)


@cache
def declared() -> set[str]:
    """Names of the attributes of tables."""
    return {name for module in tables() for name in declared_in(module)} - {"stats", "progress"}


@cache
def writing() -> set[str]:
    """Names of the methods of tables that write."""
    return {name for module in tables() for name in writing_in(module)}


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
    assert [name for _, name in written_in(ast.parse(source), names, OTHERS)] == ["a", "b", "c", "d", "e", "g", "h"]


def test_every_method_that_writes_is_found_and_whoever_calls_it() -> None:
    table = """
class Table:
    def __init__(self): self.a = 1
    def assign(self): self.a = 1
    def add(self): self.a += 1
    def delete(self): del self.a[0]
    def change(self): self.a.append(1)
    def mark(self, other): other.a = 1
    def call(self): return self.call_on()
    def call_on(self): self.add()
    def look(self): return self.a.index(1)
    def count(self): a = 1; return a
"""
    names = ["add", "assign", "call", "call_on", "change", "delete", "mark"]
    assert sorted(writing_in(ast.parse(table))) == names
    source = """
table.assign()
owner.table.add(1)
tables[0].delete(2)
make().change()
await table.mark(3)
table.call
self.call_on()
planner.views.call_on()
log.call_on()
", ".add()
table.look()
"""
    assert [name for _, name in called_in(ast.parse(source), set(names), ["log"])] == ["assign", "add", "delete", "change", "mark"]


def declared_in(module: ast.Module) -> Iterator[str]:
    """Names of the attributes of all classes of a module."""
    for cls in (node for node in ast.walk(module) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(cls):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
                yield node.attr


def writing_in(module: ast.Module) -> Iterator[str]:
    """Names of the methods of all classes of a module that write an attribute, themselves or through another method."""
    for cls in (node for node in ast.walk(module) if isinstance(node, ast.ClassDef)):
        methods = {node.name: node for node in cls.body if isinstance(node, Function) and node.name != "__init__"}
        found, before = {name for name, method in methods.items() if any(map(_written, ast.walk(method)))}, set[str]()
        while found != before:
            before = found
            found = found | {name for name, method in methods.items() if any(_is_called(node, found) for node in ast.walk(method))}
        yield from found


def _is_called(node: ast.AST, names: Container[str]) -> bool:
    """Whether `node` calls one of these methods of its own object."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names and _is_own(node.func)


def _is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id == "self"


def written_in(module: ast.Module, names: Container[str], others: Container[str]) -> Found:
    for node in ast.walk(module):
        target = _written(node)
        if target is not None and target.attr in names and not _is_own(target) and _owner(target) not in others:
            yield target.lineno, target.attr


def called_in(module: ast.Module, names: Container[str], others: Container[str]) -> Found:
    """Calls of methods of these names, but for those of text, of the caller's own object, and of the planner, which decides."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in names:
            continue
        target = node.func
        is_ours = _is_own(target) or isinstance(target.value, ast.Constant) or _root(target) == "planner"
        if not is_ours and _owner(target) not in others:
            yield target.lineno, target.attr


def _root(target: ast.AST) -> str | None:
    """Name of the value with which a chain of attributes begins."""
    while isinstance(target, ast.Attribute):
        target = target.value
    return target.id if isinstance(target, ast.Name) else None


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
