"""A set of bytes kept as disjoint ranges, found by place and by size. Pure code; the building block of `Space`.

Invariants: ranges never touch (neighbours are merged), none is empty, and both indices name the same ranges.
Every operation on one range costs two bisections and two list edits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator


class RangeSet:
    """Half-open ranges (start, end) of bytes; owner of both indices."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        """(length, start), so that the best fit with the lowest start is one bisection away."""
        self._total_bytes = 0
        """Sum of all lengths; kept, because `reserve` asks for it once per extent and volume."""

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The ranges in order of start."""
        return ((start, self._ends[start]) for start in self._starts)

    def first(self) -> tuple[int, int] | None:
        """The range that starts lowest; None if the set is empty."""
        if not self._starts:
            return None
        return self._starts[0], self._ends[self._starts[0]]

    def copy(self) -> RangeSet:
        """An independent set of the same ranges."""
        twin = RangeSet()
        twin._starts, twin._ends = self._starts.copy(), self._ends.copy()
        twin._by_length, twin._total_bytes = self._by_length.copy(), self._total_bytes
        return twin

    def overlap(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of [start, end) that are in the set, in order."""
        parts = []
        index = max(0, bisect_right(self._starts, start) - 1)
        while index < len(self._starts) and self._starts[index] < end:
            low, high = max(start, self._starts[index]), min(end, self._ends[self._starts[index]])
            if low < high:
                parts.append((low, high))
            index += 1
        return parts

    def add(self, start: int, end: int) -> None:
        """Adds [start, end), none of which may be in the set already."""
        assert start < end, f"empty range {start}..{end}"
        assert not self.overlap(start, end), f"range {start}..{end} is in the set already"
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == end:
            end = self._drop(index)[1]
        if index > 0 and self._ends[self._starts[index - 1]] == start:
            start = self._drop(index - 1)[0]
        self._insert(start, end)

    def remove(self, start: int, end: int) -> None:
        """Removes [start, end), all of which must lie in one range of the set."""
        index = bisect_right(self._starts, start) - 1
        assert index >= 0, f"range {start}..{end} is not in the set"
        assert end <= self._ends[self._starts[index]], f"range {start}..{end} is not wholly in the set"
        assert start < end, f"empty range {start}..{end}"
        low, high = self._drop(index)
        if low < start:
            self._insert(low, start)
        if end < high:
            self._insert(end, high)

    def take(self, length: int) -> int | None:
        """Takes `length` bytes from the smallest range that has them, the lowest of equals; returns their start, or None."""
        index = bisect_left(self._by_length, (length, 0))
        if index == len(self._by_length):
            return None
        start = self._by_length[index][1]
        self.remove(start, start + length)
        return start

    def take_last(self, length: int) -> int | None:
        """Takes `length` bytes from the end of the highest range that has them; returns their start, or None."""
        for start in reversed(self._starts):
            end = self._ends[start]
            if end - start >= length:
                self.remove(end - length, end)
                return end - length
        return None

    def _insert(self, start: int, end: int) -> None:
        insort(self._starts, start)
        self._ends[start] = end
        insort(self._by_length, (end - start, start))
        self._total_bytes += end - start

    def _drop(self, index: int) -> tuple[int, int]:
        start = self._starts.pop(index)
        end = self._ends.pop(start)
        position = bisect_left(self._by_length, (end - start, start))
        del self._by_length[position]
        self._total_bytes -= end - start
        return start, end
