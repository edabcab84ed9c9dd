"""Ends requests: those that wait for a slot, for a load, or for an update that makes what they want."""

from __future__ import annotations

from collections.abc import Iterable

from paramstore.engine.tables.copies import Waiter, WorkingCopy
from paramstore.engine.tables.moves import Outbox
from paramstore.engine.tables.namespace import NamespaceState, StepRequest
from paramstore.engine.tables.requests import PrefetchRequest, SlotRequest
from paramstore.errors import ParamStoreError, StepFailed


class WaitingRequests:
    """Tells requests how they ended; part of the planner, on the event-loop thread."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def fail_waiting(self, namespace: NamespaceState, error: ParamStoreError) -> None:
        """Fails requests that wait for a slot: the copies they want are gone, or the write that would free a slot has failed."""
        for arena in namespace.arenas():
            for request in [waiting for waiting in arena.waiting if isinstance(waiting, SlotRequest)]:
                arena.waiting.remove(request)
                request.error = error
                self.finish(request)

    def abandon(self, request: SlotRequest, error: ParamStoreError) -> None:
        """Takes a request that is given up before it is finished out of its queue, and fails it; nobody awaits it any more."""
        working = request.namespace.residency.working[request.key]
        for arena in request.namespace.arenas():
            if request in arena.waiting:
                arena.waiting.remove(request)
        if request in working.requests:
            working.requests.remove(request)
        request.is_finished, request.error = True, error

    def cancel(self, request: PrefetchRequest, error: ParamStoreError) -> None:
        """Ends a prefetch with `error`, unless it is finished; its loads may still land."""
        if not request.is_finished:
            request.error = request.error or error
            self.finish(request)

    def land(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        """Tells requests whose record is now in its slot: each request for the slot holds it."""
        working.holders += len(working.requests)
        record_bytes = namespace.schema.record_bytes
        self._finish_those(waiter for waiter in _taken(working) if waiter.land(working, record_bytes))

    def fail(self, working: WorkingCopy, error: ParamStoreError | None) -> None:
        """Fails requests whose record will not be in its slot: with `error`, or (None) saying that a rollback discarded it."""
        reason = error or StepFailed(f"{working.key} was discarded by a rollback")
        self._finish_those(waiter for waiter in _taken(working) if waiter.fail(working, reason))

    def _finish_those(self, waiters: Iterable[Waiter]) -> None:
        for waiter in waiters:
            self.finish(waiter)

    def finish(self, waiter: Waiter) -> None:
        """Finishes a request, unless it is already; whoever awaits it is woken when what was decided is carried out."""
        if not waiter.is_finished:
            waiter.is_finished = True
            self._outbox.finished.append(waiter)


def await_request(request: Waiter | StepRequest, future: object) -> None:
    """Notes the future that is woken when `request` is finished, or may be."""
    request.future = future


def await_change(waiters: list[object], future: object) -> None:
    """Notes a future that is woken with all of `waiters`, those of a table, at its next change."""
    waiters.append(future)


def _taken(working: WorkingCopy) -> list[Waiter]:
    waiters = [*working.requests, *working.prefetches]
    working.requests, working.prefetches = [], []
    return waiters
