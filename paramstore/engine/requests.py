"""What waits: lease requests, prefetches, and those who need a working copy in its slot. Plain data of the planner.

`future` belongs to the store (an asyncio future, opaque here): the planner says which requests are finished, the store
tells whoever awaits them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from paramstore.core.key import ExpertKey
from paramstore.engine.namespace import NamespaceState, ParamCopy, View, WorkingCopy
from paramstore.errors import ParamStoreError


class Urgency(IntEnum):
    """The three classes of transfers; lower goes first. A write on which a load waits takes that load's class."""

    DEMAND = 0
    PREFETCH = 1
    WRITE_BACK = 2


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """All of `keys` or none. After planning, `copies` are in order of `keys` and `missing` of them still load."""

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
    """`pending` names what still loads; figures count up as it lands."""

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
    """Somebody needs `key`'s working copy in a slot, held (`fill`: an empty slot to fill). FIFO per arena.

    urgency: of its load, and of writes that it waits for. spared: what it evicts nothing of.
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
