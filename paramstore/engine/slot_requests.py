"""Ends requests for working copies: those that wait for a slot, for a load, or for an update that makes what they want."""

from __future__ import annotations

from paramstore.engine.moves import Outbox
from paramstore.engine.namespace import NamespaceState, WorkingCopy
from paramstore.engine.requests import PrefetchRequest, SlotRequest
from paramstore.errors import ParamStoreError, StepFailed


class SlotRequests:
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

    def land(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        """Finishes requests whose record is now in its slot: each request for the slot holds it, and prefetches count it."""
        requests, working.requests = working.requests, []
        for request in requests:
            working.holders += 1
            self.finish(request)
        prefetches, working.prefetches = working.prefetches, []
        for prefetch in prefetches:
            prefetch.loaded += 1
            prefetch.bytes_loaded += namespace.schema.record_bytes
            self._land_prefetch(prefetch, working)

    def fail(self, working: WorkingCopy, error: ParamStoreError | None) -> None:
        """Fails requests whose record will not be in its slot: with `error`, or (None) saying that a rollback discarded it."""
        reason = error or StepFailed(f"{working.key} was discarded by a rollback")
        requests, working.requests = working.requests, []
        for request in requests:
            request.error = reason
            self.finish(request)
        prefetches, working.prefetches = working.prefetches, []
        for prefetch in prefetches:
            prefetch.error = prefetch.error or reason
            self._land_prefetch(prefetch, working)

    def _land_prefetch(self, request: PrefetchRequest, working: WorkingCopy) -> None:
        request.pending.discard(working)
        if not request.pending and not request.is_finished:
            request.is_finished = True
            self._outbox.finished.append(request)

    def finish(self, request: SlotRequest) -> None:
        """Finishes the request; whoever awaits it is woken when the outbox is drained."""
        request.is_finished = True
        self._outbox.finished.append(request)
