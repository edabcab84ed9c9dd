"""Requests that wait: for leases, prefetches, and working copies in their slots. Plain data of the planner.

`future` belongs to the store (an asyncio future, opaque here): the planner says which requests are finished, the store
wakes whoever awaits them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from paramstore.core.key import ExpertKey
from paramstore.engine.namespace import NamespaceState, ParamCopy, View, WorkingCopy
from paramstore.errors import ParamStoreError


class Urgency(IntEnum):
    """The three classes of transfers; lower values go first. A write on which a load waits takes that load's class."""

    DEMAND = 0
    PREFETCH = 1
    WRITE_BACK = 2


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """Request to lease all of `keys` or none. Once planned, `copies` are in order of `keys`, and `missing` of them still load."""

    view: View
    lease_id: int
    keys: Sequence[ExpertKey]
    copies: list[ParamCopy] = field(default_factory=list)
    missing: int = 0
    error: ParamStoreError | None = None
    is_finished: bool = False
    future: object | None = None


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


Request = LeaseRequest | PrefetchRequest | SlotRequest
