"""The shared memory that one connection has mapped, and the leases that refer to it.

- A segment the daemon gives up is acknowledged once no lease refers to it and it is unmapped, never before: a tensor that
  outlives its lease delays that to the end of a later lease.
- Leases that refer to a segment are counted by looking; nothing else holds the number.
- Whoever asked to be told (`before_unmap`) is told of every leased segment once, while it is still mapped.
- Whoever keeps leases that nobody uses (`LeaseKeeper`) is asked to give them back where they are in the way.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from paramstore.errors import LeaseError, ProtocolError, StoreUnavailable
from paramstore.memory.shared import Mapping
from paramstore.memory.words import word_of

if TYPE_CHECKING:
    from paramstore_client.source import LeaseKeeper

Slot = tuple[int, int, int, int]
"""(segment, offset_bytes, epoch, version), as a Granted message has it."""
BeforeUnmap = Callable[[int, int], None]
"""(address, length_bytes) of memory that is about to be unmapped."""


class Segments:
    """Owner of the mappings of one connection and of the table of its live leases."""

    def __init__(self) -> None:
        self._leased: dict[int, Mapping] = {}
        self._uploads: dict[int, Mapping] = {}
        self._words: Mapping | None = None
        self._live: dict[int, list[Slot]] = {}
        self._given_up: set[int] = set()
        self._closing: dict[int, Mapping] = {}
        self._watchers: dict[object, BeforeUnmap] = {}
        self._keepers: list[tuple[int, weakref.ref[LeaseKeeper]]] = []

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

    def adopt_words(self, length_bytes: int, fd: int) -> None:
        """Maps the session's page of words, read-only. fd: closed on return, whatever happens."""
        page = Mapping(fd, length_bytes, is_writable=False)
        if self._words is not None:
            raise ProtocolError("a second page of words was sent")
        self._words = page

    def word(self, index: int) -> Sequence[int]:
        """A word of the session's page, as a sequence of one number that the daemon changes. Raises ProtocolError where there is no
        such word."""
        if self._words is None:
            raise ProtocolError(f"word {index} was named, and no page of words was sent")
        return word_of(self._words, index)

    def leased(self, segment: int) -> Mapping:
        """The mapping of a segment that leases lie in. Raises LeaseError once the store was closed."""
        mapping = self._leased.get(segment)
        if mapping is None:
            raise LeaseError(f"segment {segment} of the lease is not mapped any more: the store was closed")
        return mapping

    def upload(self, segment: int) -> Mapping:
        """The mapping of a segment of the upload area. Raises StoreUnavailable once the store was closed."""
        mapping = self._uploads.get(segment)
        if mapping is None:
            raise StoreUnavailable(f"upload segment {segment} is not mapped any more: the store was closed")
        return mapping

    def begin_lease(self, lease: int, slots: list[Slot]) -> None:
        """Notes that `slots` are in use from here on. Raises ProtocolError if one lies in a segment that was never sent."""
        known = self._leased
        for slot in slots:
            if slot[0] not in known:
                raise ProtocolError(f"lease {lease} names segment {slot[0]}, which was never sent")
        self._live[lease] = slots

    def end_lease(self, lease: int) -> list[int]:
        """Ends a lease; returns the segments that can be acknowledged as unmapped now."""
        self._live.pop(lease, None)
        return self._forget_unused() if self._given_up else []

    def give_up(self, segments: Sequence[int]) -> list[int]:
        """Gives up segments that the daemon wants back; returns those that can be acknowledged at once, as they are unmapped."""
        known = {segment for segment in segments if segment in self._leased}
        self._given_up |= known
        return sorted(set(segments) - known) + self._forget_unused()

    def before_unmap(self, fn: BeforeUnmap) -> Callable[[], object]:
        """Has `fn(address, length_bytes)` called for each leased segment that is let go of from here on, right before.

        No lease refers to the segment then, unless the connection was closed. fn runs on the thread that ended the last
        lease, read the socket or closed the store; it must not raise. Returns the function that ends this.
        """
        token = object()
        self._watchers[token] = fn
        return lambda: self._watchers.pop(token, None)

    def add_keeper(self, handle: int, keeper: LeaseKeeper) -> Callable[[], None]:
        """Notes who keeps leases of a handle beyond their use, for as long as it lives, or until the function that is returned is
        called, which may be done twice. Both may be called from any thread."""
        entry = handle, weakref.ref(keeper)
        self._keepers.append(entry)

        def leave() -> None:
            with suppress(ValueError):
                self._keepers.remove(entry)

        return leave

    def keepers(self, handle: int | None = None) -> list[LeaseKeeper]:
        """Those who keep leases of `handle`, or of any handle, and live."""
        chosen = [one for of, one in list(self._keepers) if handle is None or of == handle]
        return [keeper for one in chosen if (keeper := one()) is not None]

    def clear(self) -> None:
        """Lets go of every mapping, as the connection is over. Tensors that were handed out keep theirs."""
        for segment in list(self._leased):
            self._let_go(segment)
        for mapping in self._uploads.values():
            mapping.close()
        self._uploads.clear()
        if self._words is not None:
            self._words.close()
            self._words = None
        self._closing.clear()
        self._live.clear()
        self._given_up.clear()

    @property
    def lease_count(self) -> int:
        return len(self._live)

    def _forget_unused(self) -> list[int]:
        """Lets go of what was given up and no lease refers to. Returns what is unmapped by now: a tensor of a released
        lease may still keep a segment, which is asked for again at the next end."""
        used = {slot[0] for slots in list(self._live.values()) for slot in slots}
        for segment in self._given_up - used:
            self._let_go(segment)
        forgotten = []
        for segment in sorted(self._given_up):
            mapping = self._closing.get(segment)
            # Two threads may end the last leases in the same moment: the one that pops acknowledges.
            if mapping is not None and not mapping.is_mapped and self._closing.pop(segment, None) is not None:
                self._given_up.discard(segment)
                forgotten.append(segment)
        return forgotten

    def _let_go(self, segment: int) -> None:
        """Gives up this object's share of the mapping, once: the pop decides between threads."""
        mapping = self._leased.pop(segment, None)
        if mapping is not None:
            for tell in list(self._watchers.values()):
                tell(mapping.address, mapping.length_bytes)
            mapping.close()
            self._closing[segment] = mapping


def close_all(fds: Iterable[int]) -> None:
    """Closes descriptors that were received and are needed no more: a mapping outlives them."""
    for fd in fds:
        os.close(fd)
