"""One session's writable segments, and the check of every range that its client names in them."""

from __future__ import annotations

from collections.abc import Iterable

from paramstore.core.key import ExpertKey
from paramstore.core.schema import PAGE_BYTES
from paramstore.engine.tables.arena import SegmentMemory
from paramstore.errors import ProtocolError


class Uploads:
    """Owner of the segments. They are destroyed with the session; no other session ever gets one."""

    def __init__(self) -> None:
        self._segments: dict[int, SegmentMemory] = {}

    def add(self, segment: int, memory: SegmentMemory) -> None:
        self._segments[segment] = memory

    def holding(self, segment: int, offset_bytes: int, length_bytes: int) -> SegmentMemory:
        """Finds a segment, and checks that the range lies in it and begins on a page. Raises ProtocolError."""
        memory = self._segments.get(segment)
        if memory is None:
            raise ProtocolError(f"segment {segment} is not an upload segment of this session")
        if offset_bytes % PAGE_BYTES or not 0 <= offset_bytes <= memory.length_bytes - length_bytes:
            raise ProtocolError(f"range {offset_bytes}+{length_bytes} is not an aligned range of segment {segment}")
        return memory

    def ranges(
        self, entries: Iterable[tuple[int, int, int, int]], length_bytes: int
    ) -> list[tuple[ExpertKey, SegmentMemory, int]]:
        """Key, segment and offset of each (layer, expert, segment, offset): ranges of `length_bytes`. Raises ProtocolError."""
        return [
            ((layer, expert), self.holding(segment, offset_bytes, length_bytes), offset_bytes)
            for layer, expert, segment, offset_bytes in entries
        ]

    def close(self) -> None:
        """Gives the memory back, which nothing reads any more. Idempotent."""
        for memory in self._segments.values():
            memory.close()
        self._segments.clear()
