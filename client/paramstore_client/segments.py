"""The shared memory that one connection has mapped, and the leases that refer to it.

- A segment the daemon gives up is acknowledged once no lease refers to it and it is unmapped, never before: a tensor that
  outlives its lease delays that to the end of a later lease.
- Leases that refer to a segment are counted by looking; nothing else holds the number.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Sequence

from paramstore.errors import LeaseError, ProtocolError, StoreUnavailable
from paramstore.memory.shared import Mapping

Slot = tuple[int, int, int, int]
"""(segment, offset_bytes, epoch, version), as a Granted message has it."""


class Segments:
    """Owner of the mappings of one connection and of the table of its live leases."""

    def __init__(self) -> None:
        self._leased: dict[int, Mapping] = {}
        self._uploads: dict[int, Mapping] = {}
        self._live: dict[int, list[Slot]] = {}
        self._given_up: set[int] = set()

    def adopt_leased(self, segments: Sequence[tuple[int, int]], fds: Sequence[int]) -> None:
        """Maps new segments of the daemon, read-only. fds: one per segment, closed on return, whatever happens."""
        unused = deque(fds)
        try:
            for segment, length_bytes in segments:
                if segment in self._leased:
                    raise ProtocolError(f"segment {segment} was sent twice")
                self._leased[segment] = Mapping(unused.popleft(), length_bytes, is_writable=False)
        finally:
            close_all(unused)

    def adopt_upload(self, segment: int, length_bytes: int, fd: int) -> None:
        """Maps a new segment of this session's upload area, writable. fd: closed on return, whatever happens."""
        mapping = Mapping(fd, length_bytes, is_writable=True)
        if segment in self._uploads:
            raise ProtocolError(f"upload segment {segment} was sent twice")
        self._uploads[segment] = mapping

    def leased(self, segment: int) -> Mapping:
        """Raises LeaseError once the store was closed."""
        mapping = self._leased.get(segment)
        if mapping is None:
            raise LeaseError(f"segment {segment} of the lease is not mapped any more: the store was closed")
        return mapping

    def upload(self, segment: int) -> Mapping:
        """Raises StoreUnavailable once the store was closed."""
        mapping = self._uploads.get(segment)
        if mapping is None:
            raise StoreUnavailable(f"upload segment {segment} is not mapped any more: the store was closed")
        return mapping

    def begin_lease(self, lease: int, slots: list[Slot]) -> None:
        """`slots` are in use from here on. Raises ProtocolError if one lies in a segment that was never sent."""
        known = self._leased
        for slot in slots:
            if slot[0] not in known:
                raise ProtocolError(f"lease {lease} names segment {slot[0]}, which was never sent")
        self._live[lease] = slots

    def end_lease(self, lease: int) -> list[int]:
        """The segments that can be acknowledged as unmapped, now that this lease is over."""
        self._live.pop(lease, None)
        return self._forget_unused() if self._given_up else []

    def give_up(self, segments: Sequence[int]) -> list[int]:
        """The daemon wants these back. Returns those that no lease refers to: they are forgotten already."""
        self._given_up.update(segments)
        return self._forget_unused()

    def clear(self) -> None:
        """The connection is over: lets go of every mapping. Tensors that were handed out keep theirs."""
        for mapping in (*self._leased.values(), *self._uploads.values()):
            mapping.close()
        self._leased.clear()
        self._uploads.clear()
        self._live.clear()
        self._given_up.clear()

    @property
    def lease_count(self) -> int:
        return len(self._live)

    def _forget_unused(self) -> list[int]:
        used = {slot[0] for slots in list(self._live.values()) for slot in slots}
        forgotten = []
        for segment in sorted(self._given_up - used):
            if self._is_unmapped(segment):
                # Two threads may end the last leases in the same moment: one of them acknowledges.
                with contextlib.suppress(KeyError):
                    self._given_up.remove(segment)
                    forgotten.append(segment)
        return forgotten

    def _is_unmapped(self, segment: int) -> bool:
        """Lets go of the mapping. False while a tensor of a released lease still keeps it: asked again at the next end."""
        mapping = self._leased.get(segment)
        if mapping is None:
            return True
        mapping.close()
        if mapping.is_mapped:
            return False
        self._leased.pop(segment, None)
        return True


def close_all(fds: Iterable[int]) -> None:
    """Closes descriptors that were received and are needed no more: a mapping outlives them."""
    for fd in fds:
        os.close(fd)
