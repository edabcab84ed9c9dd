"""The messages that the daemon sends: answers, and what it sends unasked. See `paramstore.wire.messages`."""

from __future__ import annotations

from typing import Any, ClassVar

from paramstore.wire.base import Message


class Done(Message, tag="done"):
    """The request was carried out. result: as the request's docstring says."""

    id: int
    result: Any = None


class Granted(Message, tag="granted"):
    """The lease is granted. slots: (segment, offset_bytes, epoch, version) of each key, in the order asked. segments: (id,
    length_bytes) of those that this client sees for the first time; their fds are attached. absent: how many of the keys had to be
    waited for, as their bytes were not in memory. To clients from ABSENT_MINOR on, to others 0."""

    ADDED_FIELDS: ClassVar[int] = 1

    id: int
    slots: list[tuple[int, int, int, int]]
    segments: list[tuple[int, int]]
    absent: int = 0


class GrantedExtents(Message, tag="granted_extents"):
    """The lease of extents is granted. extents: (volume, offset_bytes, length_bytes, epoch, version, root) of each key, in the
    order asked; the record's image is at its start. sums: of each, the device sums of its chunks, 8 bytes each, little-endian
    (`core.checksums`). volumes: those that this client sees for the first time; their read-only fds are attached."""

    id: int
    extents: list[tuple[int, int, int, int, int, int]]
    sums: list[bytes]
    volumes: list[int]


class Lent(Message, tag="lent"):
    """The handle has `count` slots beyond its promise now. word: index of the session's word that says how many of them it may
    keep; a lower number there asks slots back. page_bytes: length of the page of words, where its fd is attached; else 0."""

    id: int
    count: int
    word: int
    page_bytes: int


class Uploaded(Message, tag="uploaded"):
    """The session has a new, writable upload segment; its fd is attached."""

    id: int
    segment: int
    length_bytes: int


class Failed(Message, tag="failed"):
    """The request failed, or (id 0) the daemon hangs up. error: a class name of paramstore.errors."""

    id: int
    error: str
    message: str


class Unmap(Message, tag="unmap"):
    """Asks the client to unmap these segments once no lease is left in them, and then to send Unmapped."""

    segments: list[int]


class LeaseSlots(Message, tag="lease_slots"):
    """Says how many slots this handle may lease from now on. Only daemons before PROMISE_MINOR send it."""

    handle: int
    slots: int


Answer = Done | Granted | GrantedExtents | Lent | Uploaded | Failed | Unmap | LeaseSlots
