"""Rare situations that a simulation must have met ("sometimes" markers), and the probes that see them from outside.

A probe wraps a method of the engine, looks, and calls it; it changes nothing. Clients and the world set the other markers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from paramstore.core.residency import Working
from paramstore.engine.planner.param_copies import CopyPlanner
from paramstore.engine.planner.working_copies import WorkingPlanner
from paramstore.engine.records.cleaner import Cleaner
from paramstore.engine.records.update import Updater
from paramstore.engine.steps.borrowed import Borrowed
from paramstore.engine.steps.proof import Prover
from paramstore.engine.steps.transactions import Transactions
from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.scheduler import Scheduler

Mark = Callable[[str], object]

MARKERS = (
    "prefetch promoted by demand", "write promoted by who waits", "eviction refused by a lease", "commit beside apply",
    "update waited for a cut", "rollback during a commit", "writer came during a commit", "failed write repeated elsewhere",
    "unknown transaction resolved: it happened", "unknown transaction resolved: it did not", "store stopped",
    "failed flush broke a namespace", "apply failed half-way", "reader dropped from its step", "reader on an old step",
    "crash with an unpublished record", "crash during a commit", "crash with unflushed writes",
    "commit survived without its answer", "snapshot outlived a crash", "lease wait timed out", "lease granted after a wait",
    "lease above the cap", "own leases in the way", "lease cancelled", "prefetch cancelled", "writer fenced",
    "writer fenced the one before", "space waited for", "orphaned write", "leased copy superseded", "client died with leases",
    "client died during its apply", "client died within a frame", "lease outlived its connection", "client that does not read",
    "read error reached who asked", "daemon stopped in order", "request that must be refused", "step committed again",
    "verify beside a commit", "all clients left", "step prepared and finalized", "writer died with a prepared step",
    "writer met a prepared step", "prepared step committed by the next writer", "older step borrowed its room",
    "older step gave its room back",
)  # fmt: skip
"""Names of all markers. Each must be met LEAST times in a run, or the run proves too little."""
LEAST = 20


@contextmanager
def probed(mark: Mark) -> Iterator[None]:
    """Lets probes call `mark` with a marker's name, within the block."""
    with ExitStack() as stack:
        for owner, name, probe in _probes(mark):
            original = vars(owner)[name]
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, probe(original))
        yield


def _probes(mark: Mark) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    return [
        (Scheduler, "promote", _of_promote(mark)),
        (
            Updater, "_until_mine",
            _before(lambda _, ns, working, epoch: ns.steps.is_cut(working) and mark("update waited for a cut")),
        ),
        (WorkingPlanner, "settle_write", _of_settle_write(mark)),
        (WorkingPlanner, "discard", _before(lambda _, ns, working: working.state is Working.WRITING and mark("orphaned write"))),
        (CopyPlanner, "retire", _before(lambda _, ns, copy: copy.leases and mark("leased copy superseded"))),
        (Cleaner, "until_space", _before(lambda *_, **__: mark("space waited for"))),
        (Borrowed, "choose", _of_borrowed(mark)),
        (Prover, "_distrust", _before(lambda *_: mark("failed flush broke a namespace"))),
        (Transactions, "_stop", _before(lambda *_: mark("store stopped"))),
        (Transactions, "_happened", _of_happened(mark)),
    ]


def _before(look: Callable[..., object]) -> Callable[[Any], Any]:
    def probe(original: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            look(*arguments, **named)
            return original(*arguments, **named)

        return call

    return probe


def _of_promote(mark: Mark) -> Callable[[Any], Any]:
    def look(_: Any, transfer: Any, urgency: Urgency) -> None:
        if urgency < transfer.urgency:
            mark("prefetch promoted by demand" if transfer.urgency is Urgency.PREFETCH else "write promoted by who waits")

    return _before(look)


def _of_settle_write(mark: Mark) -> Callable[[Any], Any]:
    def look(_: Any, namespace: Any, working: Any, located: Any, error: Any) -> None:
        if error is None and working.write_failures.tries and not working.is_orphan:
            mark("failed write repeated elsewhere")

    return _before(look)


def _of_borrowed(mark: Mark) -> Callable[[Any], Any]:
    def probe(original: Any) -> Any:
        def choose(self: Borrowed, namespace: Any, older: Any) -> tuple[int, ...]:
            going: tuple[int, ...] = original(self, namespace, older)
            if len(going) < len(older.steps):
                mark("older step borrowed its room")
            if going:
                mark("older step gave its room back")
            return going

        return choose

    return probe


def _of_happened(mark: Mark) -> Callable[[Any], Any]:
    def probe(original: Any) -> Any:
        async def happened(*arguments: Any) -> bool:
            result = bool(await original(*arguments))
            mark(f"unknown transaction resolved: it {'happened' if result else 'did not'}")
            return result

        return happened

    return probe
