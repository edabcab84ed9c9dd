"""This session's upload area: which ranges of its writable segments are free.

- A range is taken or free, never both; what is given back may be taken again at once.
- Taking for several keys is all or nothing: when the daemon refuses to grow the area, nothing has changed.
- What others have reserved and not taken yet is left to them.
- `give_back` takes no lock: it is called where answers are read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple, Protocol

from paramstore.core.schema import PAGE_BYTES, round_up
from paramstore.errors import CapacityError, ProtocolError
from paramstore.memory.shared import Mapping
from paramstore.wire.messages import OpenUpload, Uploaded
from paramstore_client.connection.shared_socket import Connection


class Range(NamedTuple):
    """A page-aligned byte range of an upload segment."""

    segment: int
    offset_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.length_bytes


class Tenant(Protocol):
    """Somebody who has reserved room in the area."""

    @property
    def unused_room_bytes(self) -> int:
        """Bytes that it has reserved and not taken."""
        ...


class UploadArea:
    """Owner of the free ranges of one connection's upload segments."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._allocating = threading.Lock()
        self._free: list[Range] = []  # sorted; no two touch
        self._returned: deque[Range] = deque()
        self._segments: dict[int, Range] = {}
        """Each segment as a whole, by its number."""
        self.tenants: list[Tenant] = []

    @property
    def size_bytes(self) -> int:
        """Bytes the daemon has given this session so far."""
        return sum(segment.length_bytes for segment in list(self._segments.values()))

    def take(
        self, count: int, length_bytes: int, *, most_bytes: int, limit_bytes: int | None = None, by: Tenant | None = None
    ) -> list[Range]:
        """`count` ranges of `length_bytes` each, from what is free, else from a new segment.

        most_bytes: size to which the area may grow ahead of need. limit_bytes: size to which it may grow at all;
        None: the daemon alone sets a limit. by: the tenant whose room the ranges are part of. Raises CapacityError when there is
        no room; then nothing was taken.
        """
        length_bytes = round_up(length_bytes, PAGE_BYTES)
        with self._allocating:
            self._take_in_returned()
            taken = self._carve(count, length_bytes)
            kept_bytes = sum(tenant.unused_room_bytes for tenant in self.tenants if tenant is not by)
            missing_bytes = (count - len(taken)) * length_bytes
            if kept_bytes:
                missing_bytes += max(0, kept_bytes - sum(free.length_bytes for free in self._free))
            if missing_bytes:
                try:
                    if limit_bytes is not None and self.size_bytes + missing_bytes > limit_bytes:
                        raise CapacityError(f"upload memory: {missing_bytes} bytes more than this rank's share of gradient_budget")
                    self._grow(missing_bytes, most_bytes=most_bytes)
                except BaseException:
                    self.give_back(taken)
                    raise
                taken += self._carve(count - len(taken), length_bytes)
            return taken

    def give_back(self, ranges: Iterable[Range]) -> None:
        """Gives back ranges that the daemon reads no more. Callable from any thread, with any lock held."""
        self._returned.extend(ranges)

    def give_back_all(self, ranges: dict[Any, Range]) -> None:
        """Gives back all of `ranges` and empties it, in one call of C: after or within an interrupt it may be called again."""
        self._returned.extend(filter(None, map(ranges.pop, tuple(ranges), repeat(None))))

    def mapping(self, segment: int) -> Mapping:
        return self._connection.segments.upload(segment)

    def free_bytes(self) -> int:
        with self._allocating:
            self._take_in_returned()
            return sum(free.length_bytes for free in self._free)

    def _grow(self, missing_bytes: int, *, most_bytes: int) -> None:
        """Doubles the area up to `most_bytes`; adds just what is missing when that is more, or all there is room for."""
        ahead_bytes = min(max(missing_bytes, self.size_bytes), most_bytes - self.size_bytes)
        try:
            self._open_segment(max(missing_bytes, ahead_bytes))
        except CapacityError:
            if ahead_bytes <= missing_bytes:
                raise
            self._open_segment(missing_bytes)

    def _open_segment(self, size_bytes: int) -> None:
        connection = self._connection
        message = OpenUpload(connection.next_id(), size_bytes)
        opened = connection.request(message, what=f"upload area of {size_bytes} bytes more", convert=self._adopt).wait()
        if opened.length_bytes < size_bytes:
            raise ProtocolError(f"{size_bytes} bytes of upload area were asked for, {opened.length_bytes} came")
        # Fails here, with an error, where there is no memory for it; a copy into it would end the process.
        self.mapping(opened.segment).touch()
        self._take_in_returned()

    def _adopt(self, answer: object) -> Range:
        """Takes in a new segment, free as a whole, even if the wait for it was given up."""
        if not isinstance(answer, Uploaded):
            raise ProtocolError(f"{type(answer).__name__} answers a request for upload memory")
        segment = Range(answer.segment, 0, answer.length_bytes)
        if segment.segment not in self._segments:  # added and returned in one call of C: it may be adopted again after an interrupt
            self._returned.extend(map(self._segments.setdefault, (segment.segment,), (segment,)))
        return segment

    def _carve(self, count: int, length_bytes: int) -> list[Range]:
        """Up to `count` ranges from the first holes that are large enough."""
        taken: list[Range] = []
        kept: list[Range] = []
        for hole in self._free:
            fits = min(count - len(taken), hole.length_bytes // length_bytes)
            start = hole.offset_bytes
            taken += [Range(hole.segment, start + number * length_bytes, length_bytes) for number in range(fits)]
            used_bytes = fits * length_bytes
            if used_bytes < hole.length_bytes:
                kept.append(Range(hole.segment, start + used_bytes, hole.length_bytes - used_bytes))
        self._free = kept
        return taken

    def _take_in_returned(self) -> None:
        """Puts returned ranges back and joins neighbours. Only with `_allocating` held."""
        if not self._returned:
            return
        while self._returned:
            self._free.append(self._returned.popleft())
        self._free = _joined(sorted(self._free))


def _joined(ranges: Sequence[Range]) -> list[Range]:
    joined: list[Range] = []
    for current in ranges:
        last = joined[-1] if joined else None
        if last is not None and last.segment == current.segment and last.end_bytes == current.offset_bytes:
            joined[-1] = Range(last.segment, last.offset_bytes, last.length_bytes + current.length_bytes)
        else:
            joined.append(current)
    return joined

