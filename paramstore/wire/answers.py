"""The answers: what the daemon sends. See `paramstore.wire.messages`."""

from __future__ import annotations

from typing import Any

from paramstore.wire.base import Message


class Done(Message, tag="done"):
    id: int
    result: Any = None


class Granted(Message, tag="granted"):
    """A lease. slots: per key (segment, offset_bytes, epoch, version), in the order asked. segments: (id, length_bytes)
    of those this client sees for the first time; their fds are attached."""

    id: int
    slots: list[tuple[int, int, int, int]]
    segments: list[tuple[int, int]]


class Uploaded(Message, tag="uploaded"):
    """A new upload segment of this session, writable; its fd is attached."""

    id: int
    segment: int
    length_bytes: int


class Failed(Message, tag="failed"):
    """error: a class name of paramstore.errors."""

    id: int
    error: str
    message: str


class Unmap(Message, tag="unmap"):
    """The daemon gives these segments up: unmap them once no lease is left, then send Unmapped."""

    segments: list[int]


class LeaseSlots(Message, tag="lease_slots"):
    """How many slots this handle may lease from now on. Sent by daemons before PROMISE_MINOR alone."""

    handle: int
    slots: int


Answer = Done | Granted | Uploaded | Failed | Unmap | LeaseSlots
