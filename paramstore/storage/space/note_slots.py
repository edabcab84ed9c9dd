"""Keeps which commit note slots are free: a note is overwritten only when no existing step names its slot."""

from __future__ import annotations

import heapq

from paramstore.errors import CapacityError, CorruptCatalog


class NoteSlots:
    """The store's note slots, which are the same on every volume. Each step of each namespace takes one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._taken: set[int] = set()

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Takes the lowest free slot. Raises CapacityError if there is none."""
        if not self._free:
            raise CapacityError(
                f"all {self.count} commit note slots are in use, one per retained step, held step, prepared step and "
                "snapshot of every namespace: finalize prepared steps, or drop snapshots"
            )
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def occupy(self, slot: int) -> None:
        """Takes the slot that a step names when the store is opened. Raises CorruptCatalog if another step names it too, or there
        is no such slot."""
        if not 0 <= slot < self.count:
            raise CorruptCatalog(f"commit note slot {slot} is named by a step; the volumes have {self.count}")
        if slot in self._taken:
            raise CorruptCatalog(f"commit note slot {slot} is named by two steps")
        self._free.remove(slot)
        heapq.heapify(self._free)
        self._taken.add(slot)

    def free(self, slot: int) -> None:
        """Frees a taken slot; the step that named it must be durably gone, or its commit failed."""
        self._taken.remove(slot)
        heapq.heappush(self._free, slot)
