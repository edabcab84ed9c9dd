"""The slots of one arena: which are free, and the generation of each.

A slot's generation grows each time it is freed, so that a stale reference to it can be told from a live one.
"""

from __future__ import annotations

from collections import deque


class SlotTable:
    """An arena's free list. Slots are numbered 0 .. count-1 over all its segments.

    Invariant: a slot is free or taken, never both; `generation(slot)` never decreases.
    """

    def __init__(self) -> None:
        self._free: deque[int] = deque()
        self._taken: set[int] = set()
        self._generations: list[int] = []

    @property
    def count(self) -> int:
        return len(self._generations)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def grow(self, count: int) -> range:
        """Adds `count` free slots and returns their numbers."""
        first = len(self._generations)
        added = range(first, first + count)
        self._generations.extend([0] * count)
        self._free.extend(added)
        return added

    def take(self) -> int:
        """Takes a free slot, of which there must be one. The one freed last comes first, because its pages are warm."""
        slot = self._free.pop()
        self._taken.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Gives a taken slot back; references to its old generation are stale from here on."""
        self._taken.remove(slot)
        self._generations[slot] += 1
        self._free.append(slot)

    def is_taken(self, slot: int) -> bool:
        return slot in self._taken

    def generation(self, slot: int) -> int:
        return self._generations[slot]
