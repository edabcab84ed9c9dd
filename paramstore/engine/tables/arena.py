"""One arena: the memory of one (namespace, part), its slots, and the policy that ranks what they hold.

Owned by the planner on the event-loop thread; workers only ever get the memoryview of one slot. Slots are numbered over
all segments; a segment holds whole slots, so (segment, offset) of a slot is a division.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from paramstore.config import SEGMENT_ALIGNMENT_BYTES
from paramstore.core.slots import SlotTable
from paramstore.policy.base import Policy

SEGMENT_BYTES = 1 << 30
SEGMENTS_MAX = 48
"""Segments of one arena at most: a lease may name all of them at once, and one message carries 64 descriptors."""


class SegmentMemory(Protocol):
    """The memory of one segment, as an arena needs it; `paramstore.memory.arena.Segment` is the real one."""

    @property
    def length_bytes(self) -> int: ...

    @property
    def fd(self) -> int | None: ...

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview: ...

    def touch(self) -> None: ...

    def resident_bytes(self) -> int: ...

    def close(self) -> None: ...


class Arena:
    """Slots of `slot_bytes` in segments that are added once their pages are touched."""

    def __init__(
        self, *, slot_bytes: int, planned_slots: int, policy: Policy, dirty_limit_bytes: int | None = None
    ) -> None:
        self.slot_bytes = slot_bytes
        self.planned_slots = planned_slots
        """Slots that the arena will have once all its segments are touched; limits on leases and prefetches count in these."""
        self.policy = policy
        self.dirty_limit_bytes = dirty_limit_bytes
        """Dirty bytes above which the cleaner writes early; None: as many as fit."""
        self.planned_segments: deque[tuple[int, SegmentMemory, int]] = deque()
        """(segment id, memory, slots) of segments whose pages are not touched yet; still to be added."""
        self.waiting: deque[Any] = deque()
        """Requests that wait for slots, first come first served; written by the planner."""
        self.slots = SlotTable()
        self.segments: list[tuple[int, SegmentMemory, int]] = []
        """(segment id, memory, number of its first slot) of each segment in use."""
        self._homes: list[tuple[SegmentMemory, int, int]] = []
        """(memory, segment id, offset in the segment) of each slot."""

    def add_segment(self, segment_id: int, memory: SegmentMemory, *, slots: int) -> None:
        """Makes `slots` slots of the segment available. Its pages are touched already."""
        added = self.slots.grow(slots)
        self.segments.append((segment_id, memory, added.start))
        self._homes.extend((memory, segment_id, index * self.slot_bytes) for index in range(slots))

    def view(self, slot: int) -> memoryview:
        """Returns the slot's bytes, writable."""
        memory, _, offset_bytes = self._homes[slot]
        return memory.view(offset_bytes, self.slot_bytes)

    def place(self, slot: int) -> tuple[int, int]:
        """Returns (segment id, offset in bytes), by which a client finds the slot."""
        _, segment_id, offset_bytes = self._homes[slot]
        return segment_id, offset_bytes


@dataclass(frozen=True, slots=True)
class Arenas:
    """The two arenas of one namespace. working: that of the stored part, `optim`; for a param schema it is `param` itself."""

    param: Arena
    working: Arena

    def each(self) -> tuple[Arena, ...]:
        """The arenas without repeating one, that of working copies first."""
        return (self.param,) if self.working is self.param else (self.working, self.param)


def segment_lengths(slot_count: int, slot_bytes: int) -> list[int]:
    """Lengths of the segments that hold `slot_count` slots, whole slots in each. They are of about SEGMENT_BYTES, or larger where
    they would be too many to name in one message."""
    segment_bytes = max(SEGMENT_BYTES, slot_count * slot_bytes // SEGMENTS_MAX)
    per_segment = max(1, -(-segment_bytes // slot_bytes))
    lengths = []
    while slot_count > 0:
        count = min(slot_count, per_segment)
        lengths.append(-(-count * slot_bytes // SEGMENT_ALIGNMENT_BYTES) * SEGMENT_ALIGNMENT_BYTES)
        slot_count -= count
    return lengths


def slots_within(budget_bytes: int, slot_bytes: int) -> int:
    """The most slots whose segments fit `budget_bytes`."""
    count = max(0, budget_bytes // slot_bytes)
    while count > 0 and sum(segment_lengths(count, slot_bytes)) > budget_bytes:
        count -= 1
    return count
