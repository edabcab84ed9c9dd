"""Requests that wait for prefetches and for working copies in their slots, beside leases, which belong to a view. Plain data.

`future` belongs to whoever awaits a request (opaque here): the planner says which requests are finished.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import IntEnum

from paramstore.core.key import ExpertKey
from paramstore.engine.tables.copies import ParamCopy, WorkingCopy
from paramstore.engine.tables.namespace import LeaseRequest, NamespaceState
from paramstore.errors import ParamStoreError


class Urgency(IntEnum):
    """The three classes of transfers; lower values go first. A write on which a load waits takes that load's class."""

    DEMAND = 0
    PREFETCH = 1
    WRITE_BACK = 2


@dataclass(slots=True, eq=False)
class PrefetchRequest:
    """A request to load ahead of use. `pending` holds the copies that still load; the counts go up as they land."""

    namespace: NamespaceState
    part: str
    deadline_s: float | None
    pending: set[ParamCopy | WorkingCopy] = field(default_factory=set)
    loaded: int = 0
    resident: int = 0
    skipped: int = 0
    bytes_loaded: int = 0
    error: ParamStoreError | None = None
    is_finished: bool = False
    future: object | None = None

    def land(self, copy: WorkingCopy | ParamCopy, bytes_loaded: int) -> bool:
        self.loaded += 1
        self.bytes_loaded += bytes_loaded
        return self._is_last(copy)

    def fail(self, copy: WorkingCopy | ParamCopy, error: ParamStoreError) -> bool:
        self.error = self.error or error
        return self._is_last(copy)

    def skip(self, copy: WorkingCopy | ParamCopy) -> bool:
        self.skipped += 1
        return self._is_last(copy)

    def _is_last(self, copy: WorkingCopy | ParamCopy) -> bool:
        self.pending.discard(copy)
        return not self.pending


@dataclass(slots=True, eq=False)
class SlotRequest:
    """A request for `key`'s working copy in a slot, held (`is_fill`: an empty slot to fill). Served in FIFO order per arena.

    urgency: that of its load, and of writes that it waits for. spared: keys that are not evicted for it.
    """

    namespace: NamespaceState
    key: ExpertKey
    is_fill: bool = False
    urgency: Urgency = Urgency.DEMAND
    spared: Container[ExpertKey] = ()
    is_finished: bool = False
    error: ParamStoreError | None = None
    future: object | None = None

    def land(self, copy: WorkingCopy | ParamCopy, bytes_loaded: int) -> bool:
        return True

    def fail(self, copy: WorkingCopy | ParamCopy, error: ParamStoreError) -> bool:
        self.error = self.error or error
        return True

    def skip(self, copy: WorkingCopy | ParamCopy) -> bool:
        raise AssertionError("a working copy that somebody waits for stays")


Request = LeaseRequest | PrefetchRequest | SlotRequest
