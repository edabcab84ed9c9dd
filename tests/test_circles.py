"""No module leads back to itself by its imports, types and late ones counted, and no folder below a package does.

Python minds only circles that run; a reader who wants to know one file of a circle must know them all.
"""

from __future__ import annotations

import ast

from paramstore_testkit.source import imported, modules, tree

DEEPEST = 5

Arrows = dict[str, set[str]]
"""For each room, a module or a folder, the rooms whose modules it imports."""


def test_no_room_leads_back_to_itself() -> None:
    files = file_arrows()
    assert {room for depth in range(1, DEEPEST + 1) for room in in_circles(room_arrows(files, depth))} == set()


def test_a_circle_is_found() -> None:
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == {"a", "b", "c"}
    assert room_arrows({"p.x.a": {"p.y.b"}, "p.y.b": {"p.y.c"}, "p.y.c": set()}, 1) == {"p.x": {"p.y"}, "p.y": set()}


def test_types_late_imports_and_modules_of_a_package_count() -> None:
    source = """
import a
from a import b, name
if TYPE_CHECKING:
    from c import Type
def late():
    import a.d as d
"""
    assert set(imported(ast.parse(source), {"a", "a.b", "a.d", "c"})) == {"a", "a.b", "a.d", "c"}


def file_arrows() -> Arrows:
    files = dict(modules())
    return {name: set(imported(tree(path), files)) - {name} for name, path in files.items()}


def room_arrows(files: Arrows, depth: int) -> Arrows:
    """The arrows between rooms of names that are so many dots deep: what lies deeper counts for the folder that it is in."""
    arrows: Arrows = {}
    for source, targets in files.items():
        room = _room(source, depth)
        arrows.setdefault(room, set()).update({_room(target, depth) for target in targets} - {room})
    return arrows


def in_circles(arrows: Arrows) -> set[str]:
    return {room for room in arrows if room in _reached(room, arrows)}


def _reached(start: str, arrows: Arrows) -> set[str]:
    seen: set[str] = set()
    todo = list(arrows[start])
    while todo:
        room = todo.pop()
        if room not in seen:
            seen.add(room)
            todo.extend(arrows.get(room, ()))
    return seen


def _room(module: str, depth: int) -> str:
    return ".".join(module.split(".")[: depth + 1])
