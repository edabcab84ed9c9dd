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
        """Requests that wait for a slot end with `error`: what they meant is gone, or the write fails that would free one."""
        for arena in namespace.arenas():
            for request in [waiting for waiting in arena.waiting if isinstance(waiting, SlotRequest)]:
                arena.waiting.remove(request)
                request.error = error
                self.finish(request)

    def land(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        """The record is in its slot: everyone who waited for it holds it, and prefetches count it."""
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
        """The record will not be in its slot: everyone who waited for it gets `error`, or that a rollback discarded it."""
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
        """Whoever awaits the request is told, once the outbox is drained."""
        request.is_finished = True
        self._outbox.finished.append(request)
