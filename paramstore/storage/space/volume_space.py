"""The free ranges of one volume, told apart by whether they were written before. Pure code; `Space` owns them.

A volume's bytes from `start_bytes` on are free (written or fresh), being zero-filled, or claimed by somebody
whom `Space` knows. `copy` makes a twin to try things on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from paramstore.core.location import Extent
from paramstore.storage.space.ranges import RangeSet


@dataclass(slots=True)
class VolumeSpace:
    """One volume's space. written: free, written before. fresh: free, never written. prefilling: not free until zero-filled."""

    index: int
    start_bytes: int
    size_bytes: int
    written: RangeSet = field(default_factory=RangeSet)
    fresh: RangeSet = field(default_factory=RangeSet)
    prefilling: set[Extent] = field(default_factory=set)

    @property
    def free_bytes(self) -> int:
        return self.written.total_bytes + self.fresh.total_bytes

    @property
    def prefilling_bytes(self) -> int:
        return sum(extent.length_bytes for extent in self.prefilling)

    @property
    def free_share(self) -> float:
        return self.free_bytes / (self.size_bytes - self.start_bytes)

    @property
    def written_bytes(self) -> int:
        """Offset below which every block is claimed or was written once."""
        first = self.fresh.first()
        unwritten = [extent.offset_bytes for extent in self.prefilling]
        if first is not None:
            unwritten.append(first[0])
        return min(unwritten, default=self.size_bytes)

    def free_runs(self) -> Iterator[tuple[int, int]]:
        """Yields the longest stretches of free bytes, written or not, in order."""
        run_start = run_end = -1
        for start, end in heapq.merge(self.written, self.fresh):
            if start != run_end:
                if run_end > run_start:
                    yield run_start, run_end
                run_start = start
            run_end = end
        if run_end > run_start:
            yield run_start, run_end

    def take(self, length_bytes: int) -> int | None:
        """Takes `length_bytes` free bytes and returns their offset; None only if no stretch of free bytes is that long.

        Tries written space first; then across the lowest border between written and fresh, so that filling a volume
        from its start leaves no gap there; then fresh space, from its end while a range is being zero-filled: what is left
        between the two joins that range later, so that no gap stays; then any stretch of both kinds.
        """
        offset = self.written.take(length_bytes)
        if offset is not None or not self.fresh.total_bytes:
            return offset
        offset = self._border_fit(length_bytes)
        if offset is None:
            offset = self.fresh.take_last(length_bytes) if self.prefilling else self.fresh.take(length_bytes)
            if offset is not None:
                return offset
            offset = next((start for start, end in self.free_runs() if end - start >= length_bytes), None)
        if offset is not None:
            self.carve(offset, offset + length_bytes)
        return offset

    def _border_fit(self, length_bytes: int) -> int | None:
        """Start of the written range that ends at the lowest fresh one, if both hold `length_bytes`."""
        first = self.fresh.first()
        assert first is not None, "asked only while there is fresh space"
        fresh_start, fresh_end = first
        tail = self.written.overlap(fresh_start - length_bytes, fresh_start)
        if not tail or tail[-1][1] != fresh_start or fresh_end - tail[-1][0] < length_bytes:
            return None
        return tail[-1][0]

    def carve(self, start: int, end: int) -> bool:
        """Takes [start, end) out if all of it is free; else changes nothing and returns False."""
        written, fresh = self.written.overlap(start, end), self.fresh.overlap(start, end)
        if sum(high - low for low, high in (*written, *fresh)) != end - start:
            return False
        for low, high in written:
            self.written.remove(low, high)
        for low, high in fresh:
            self.fresh.remove(low, high)
        return True

    def free(self, extent: Extent) -> None:
        """Frees the extent's bytes, which count as written."""
        self.written.add(extent.offset_bytes, extent.offset_bytes + extent.length_bytes)

    def mark_written(self, up_to_bytes: int) -> None:
        """Makes free bytes below `up_to_bytes` count as written."""
        for start, end in self.fresh.overlap(self.start_bytes, up_to_bytes):
            self.fresh.remove(start, end)
            self.written.add(start, end)

    def copy(self) -> VolumeSpace:
        """Makes an independent twin, to try out what would happen here."""
        twin = replace(self, written=self.written.copy(), fresh=self.fresh.copy())
        twin.prefilling = set(self.prefilling)
        return twin
