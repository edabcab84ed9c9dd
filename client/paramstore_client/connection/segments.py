"""The shared memory that one connection has mapped, and the leases that refer to it.

- A segment the daemon gives up is acknowledged once no lease refers to it and it is unmapped, never before: a tensor that
  outlives its lease delays that to the end of a later lease.
- Leases that refer to a segment are counted by looking; nothing else holds the number.
- Whoever asked to be told (`before_unmap`) is told of every leased segment, while it is still mapped: once, or again where an
  interrupt came. Until then nobody gives up the mapping.
- Whoever keeps leases that nobody uses (`LeaseKeeper`) is asked to give them back where they are in the way.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from operator import call

from paramstore.errors import LeaseError, ProtocolError, StoreUnavailable
from paramstore.memory.shared import Mapping
from paramstore.memory.words import word_of
from paramstore_client.connection.volume_file import VolumeFile
from paramstore_client.source import LeaseKeeper

Slot = tuple[int, int, int, int]
"""(segment, offset_bytes, epoch, version), as a Granted message has it."""
Noted = deque[object]
"""Gets an item within the call of C, where no handler of a signal runs, that does what is noted."""
BeforeUnmap = Callable[[int, int], None]
"""(address, length_bytes) of memory that is about to be unmapped."""


class Segments:
    """Owner of the mappings of one connection and of the table of its live leases."""

    def __init__(self) -> None:
        self._leased: dict[int, Mapping] = {}
        self._uploads: dict[int, Mapping] = {}
        self._words: Mapping | None = None
        self._volumes: dict[int, VolumeFile] = {}
        self._live: dict[int, list[Slot]] = {}
        self._given_up: set[int] = set()
        self._closing: dict[int, Mapping] = {}
        """What has been told of, and is not acknowledged yet: any thread may close it."""
        self._telling = threading.Lock()
        self._watchers: dict[object, BeforeUnmap] = {}
        self._keepers: list[tuple[int, weakref.ref[LeaseKeeper]]] = []
        self.viewed: dict[int, object] = {}
        """What each lease that has made tensors keeps until its end, also where nobody has the lease any more."""

    def adopt_upload(self, segment: int, length_bytes: int, fd: int, *, noted: Noted) -> None:
        """Maps a new segment of this session's upload area, writable. fd stays open. noted: gets an item in the step that takes it
        in."""
        mapping = Mapping(fd, length_bytes, is_writable=True)
        if segment in self._uploads:
            raise ProtocolError(f"upload segment {segment} was sent twice")
        noted.extend(map(self._uploads.setdefault, (segment,), (mapping,)))

    def adopt_words(self, length_bytes: int, fd: int, *, noted: Noted) -> None:
        """Maps the session's page of words, read-only. fd stays open. noted: gets an item in the step that takes it in."""
        page = Mapping(fd, length_bytes, is_writable=False)
        if self._words is not None:
            raise ProtocolError("a second page of words was sent")
        noted.extend(map(setattr, (self,), ("_words",), (page,)))

    def adopt_volumes(self, volumes: Sequence[int], fds: Sequence[int], *, noted: Noted) -> None:
        """Takes descriptors of volumes, which stay open; the client has its own of each. noted: gets an item in the step that takes
        them in. Raises ProtocolError if a volume was sent before."""
        if set(volumes) & self._volumes.keys() or len(set(volumes)) < len(volumes):
            raise ProtocolError(f"of volumes {list(volumes)} one was sent twice")
        files = {volume: VolumeFile(fd) for volume, fd in zip(volumes, fds, strict=True)}
        noted.extend(map(call, (partial(self._volumes.update, files),)))

    def volume(self, index: int) -> VolumeFile:
        """The file of a volume that a lease of extents names. Raises ProtocolError where it was never sent."""
        if index not in self._volumes:
            raise ProtocolError(f"a lease of extents names volume {index}, which was never sent")
        return self._volumes[index]

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

    def begin_lease(
        self, lease: int, slots: list[Slot], segments: Sequence[tuple[int, int]] = (), fds: Sequence[int] = (), *, noted: Noted
    ) -> None:
        """Maps new segments of the daemon, read-only, and notes that `slots` are in use from here on.

        segments, fds: (segment, length_bytes) of each, and a descriptor of each, which stays open. noted: gets items in the step
        that takes all of it in; before that nothing has changed. Raises ProtocolError if a segment was sent before, or a slot lies
        in one that never was.
        """
        known = self._leased
        new = dict[int, Mapping]()
        for (segment, length_bytes), fd in zip(segments, fds, strict=True):
            if segment in known or segment in new:
                raise ProtocolError(f"segment {segment} was sent twice")
            new[segment] = Mapping(fd, length_bytes, is_writable=False)
        for slot in slots:
            if slot[0] not in known and slot[0] not in new:
                raise ProtocolError(f"lease {lease} names segment {slot[0]}, which was never sent")
        noted.extend(map(call, (partial(known.update, new), partial(self._live.__setitem__, lease, slots))))

    def end_lease(self, lease: int) -> list[int]:
        """Ends a lease; returns the segments that can be acknowledged as unmapped now."""
        self._live.pop(lease, None)
        self.viewed.pop(lease, None)
        return self.unmapped()

    def ask_back(self, segments: Sequence[int]) -> None:
        """Notes that the daemon wants these segments back."""
        self._given_up.update(segments)

    def unmapped(self) -> list[int]:
        """Lets go of what was asked back and no lease refers to. Returns what is unmapped by now, or never was mapped, until it is
        `acknowledged`; a tensor of a released lease may still keep a segment, which is asked for again at the next end."""
        if not self._given_up:
            return []
        while (unused := self._unused()) & self._leased.keys() and self._tell_of(unused):
            pass
        for mapping in list(self._closing.values()):
            mapping.close()  # again where an interrupt came between
        gone = unused - self._leased.keys()
        return sorted(segment for segment in gone if (closing := self._closing.get(segment)) is None or not closing.is_mapped)

    def acknowledged(self, segments: Sequence[int]) -> None:
        """Forgets segments, as the daemon was told that they are unmapped: it does not mind to be told twice."""
        for segment in segments:
            self._closing.pop(segment, None)
            self._given_up.discard(segment)

    def before_unmap(self, fn: BeforeUnmap) -> Callable[[], object]:
        """Has `fn(address, length_bytes)` called for each leased segment that is let go of from here on, right before.

        No lease refers to the segment then, unless the connection was closed. fn runs on one thread at a time that ended a
        lease, read the socket or closed the store; it must not raise. An interrupt within it has it called again, for the same
        memory. Returns the function that ends this.
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
        self._live.clear()
        self.viewed.clear()
        self._given_up.update(list(self._leased))
        self.acknowledged(self.unmapped())
        for mapping in self._uploads.values():
            mapping.close()
        self._uploads.clear()
        self._volumes.clear()
        if self._words is not None:
            self._words.close()
            self._words = None

    @property
    def lease_count(self) -> int:
        return len(self._live)

    def _unused(self) -> set[int]:
        """Segments that were asked back and no lease refers to."""
        given_up = self._given_up.copy()  # first: every lease in them began before they were asked back
        return given_up.difference([slot[0] for slots in list(self._live.values()) for slot in slots])

    def _tell_of(self, segments: set[int]) -> bool:
        """Tells who asked of those segments that are mapped, then takes them out of what is leased. False, and nothing was done,
        where a thread is telling already: it looks again for what is unused when it has told. Never blocks."""
        is_telling: list[bool] = []
        try:
            is_telling.extend(map(self._telling.acquire, (False,)))  # noted by the call that takes it, as in `Connection`
            if not is_telling[0]:
                return False
            for segment in sorted(segments & self._leased.keys()):
                mapping = self._leased[segment]
                for tell in list(self._watchers.values()):
                    tell(mapping.address, mapping.length_bytes)
                deque(map(self._closing.__setitem__, (segment,), map(self._leased.pop, (segment,))), 0)  # one call of C
            return True
        finally:
            if is_telling and is_telling[0]:
                self._telling.release()


def close_all(fds: deque[int]) -> None:
    """Closes descriptors that were received and are needed no more: a mapping outlives them. Each is taken off and closed within
    one call of C, so that none is closed twice, nor left, where an interrupt comes."""
    deque(map(os.close, map(deque[int].popleft, repeat(fds, len(fds)))), 0)
