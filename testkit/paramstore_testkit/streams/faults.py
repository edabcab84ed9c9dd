"""Faults planted in the device code: each of its waits taken away, found by walking its source, and a few other lines.

A wait that is added later is found, and taken away, by itself. What an `assert` asks is no wait: it is gone under `python -O`.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import patch

from torch import Tensor

from paramstore_client import device
from paramstore_client.device.copier import REACHED, CudaCopier, Mark
from paramstore_client.device.slots import DeviceCopy, DeviceSlots
from paramstore_client.device.tier import DeviceTier
from paramstore_testkit.source import Function

WAITS = {name for name in vars(Mark) if not name.startswith("_")} | {
    "query", "synchronize", "wait", "wait_event", "wait_stream", "record_stream",
}  # fmt: skip
"""Methods that wait, or ask: a mark's, and those of torch's streams, events and tensors."""
OF_THE_HOST = "ticket.host.wait"
"""A method of such a name that waits for no device."""
HOST_MODULES = {"host_slots", "loads_ahead", "loans", "report", "standing_lease"}
"""Modules that know of no device: what they wait for is the daemon."""

Fault = Callable[[], AbstractContextManager[None]]


def waits() -> dict[str, Fault]:
    """Every wait of `paramstore_client.device`: where it stands and what it says -> a `with` without it."""
    found: dict[str, Fault] = {}
    for path in sorted(Path(device.__path__[0]).glob("*.py")):
        calls = [] if path.stem in HOST_MODULES else _calls(ast.parse(path.read_text()))
        for number, (function, call) in enumerate(calls):
            name = f"{path.stem}.{function}: {ast.unparse(call)}"
            found[f"{name}, again at {number}" if name in found else name] = partial(_without, path, number)
    return found


def _calls(parsed: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """The calls that wait, and their functions' names."""
    owners: list[tuple[str, ast.Module | ast.ClassDef]] = [("", parsed)]
    owners += [(f"{node.name}.", node) for node in parsed.body if isinstance(node, ast.ClassDef)]
    functions = [(before + node.name, node) for before, owner in owners for node in owner.body if isinstance(node, Function)]
    for name, function in functions:
        asserted = {inner for node in ast.walk(function) if isinstance(node, ast.Assert) for inner in ast.walk(node)}
        calls = (node for node in ast.walk(function) if isinstance(node, ast.Call) and node not in asserted)
        yield from ((name, call) for call in calls if _waits(call.func))


def _waits(called: ast.expr) -> bool:
    return isinstance(called, ast.Attribute) and called.attr in WAITS and ast.unparse(called) != OF_THE_HOST


@contextmanager
def _without(path: Path, number: int) -> Iterator[None]:
    """Takes a module's wait away: the call is not made, and its answer is that all is done."""
    parsed = ast.parse(path.read_text())
    name, call = list(_calls(parsed))[number]
    call.func, call.args, call.keywords = ast.Name("bool", ast.Load()), [ast.Constant(True)], []
    changed = compile(ast.fix_missing_locations(parsed), str(path), "exec")
    found = attrgetter(name)(importlib.import_module(f"{device.__name__}.{path.stem}"))
    function = getattr(found, "fget", found)  # of a property
    before, function.__code__ = function.__code__, next(code for code in _codes(changed) if code.co_qualname == name)
    try:
        yield
    finally:
        function.__code__ = before


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


@contextmanager
def _slots_ready_when_made() -> Iterator[None]:
    make = DeviceSlots.__init__

    def made(self: DeviceSlots, part: object, count: int, **given: object) -> None:
        make(self, part, count, **given)  # type: ignore[arg-type]
        self._last_use = [REACHED] * count

    with patch.object(DeviceSlots, "__init__", made):
        yield


@contextmanager
def _use_over_when_begun() -> Iterator[None]:
    begin = DeviceSlots.begin_use

    def begin_use(self: DeviceSlots, copies: Collection[DeviceCopy]) -> None:
        begin(self, copies)
        for copy in copies:
            self._last_use[copy.slot] = self._copier.mark_use()

    with patch.multiple(DeviceSlots, begin_use=begin_use, end_use=lambda self, copies: None):
        yield


@contextmanager
def _passing_unmarked() -> Iterator[None]:
    let_out = DeviceTier.let_out

    def let_out_unmarked(self: DeviceTier, *visit: Any) -> None:
        with patch.object(DeviceSlots, "end_use", lambda self, copies: None):
            let_out(self, *visit)

    with patch.object(DeviceTier, "let_out", let_out_unmarked):
        yield


@contextmanager
def _mark_before_copy() -> Iterator[None]:
    copy = CudaCopier.copy

    def marked_early(self: CudaCopier, fields: Sequence[tuple[Tensor, Tensor]], *, after: Mark) -> Mark:
        mark = self._mark(self._stream)
        copy(self, fields, after=after)
        return mark

    with patch.object(CudaCopier, "copy", marked_early):
        yield


FAULTS: dict[str, Fault] = {
    **waits(),
    "slots can be copied into as soon as they are made": _slots_ready_when_made,
    "a use is over when it begins": _use_over_when_begun,
    "what passes by is overwritten without a look at its kernel": _passing_unmarked,
    "a copy's mark stands before it": _mark_before_copy,
}
