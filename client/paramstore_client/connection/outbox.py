"""Frames on their way to the socket, in order, and which threads hold theirs back for a while.

Each call that sends wakes the daemon, which takes a core from whoever computes: so a thread may have its frames leave together.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType

FRAMES_MAX = 64
"""Most frames of one call to the socket, far below what the system takes."""


class Outbox:
    """Owner of the frames that are not sent yet. Any thread and any finalizer adds; one sender at a time takes off."""

    def __init__(self) -> None:
        self._frames: deque[memoryview] = deque()
        self._gathering = threading.local()
        """`block`: the innermost `Gathered` that a thread is in."""

    def __bool__(self) -> bool:
        return bool(self._frames)

    def add(self, frame: bytes | bytearray) -> None:
        """Puts a frame behind the others. Takes no lock."""
        self._frames.append(memoryview(frame))

    def first(self) -> list[memoryview]:
        """What goes out next, in one call."""
        frames = self._frames
        return [frames[place] for place in range(min(len(frames), FRAMES_MAX))]

    def take_off(self, sent_bytes: int) -> None:
        """Notes that so many bytes of `first` were sent."""
        frames = self._frames
        while sent_bytes:
            frame = frames[0]
            if sent_bytes < len(frame):
                frames[0] = frame[sent_bytes:]
                return
            sent_bytes -= len(frame)
            frames.popleft()

    def clear(self) -> None:
        """Drops everything: nobody will read it."""
        self._frames.clear()

    @property
    def is_gathering(self) -> bool:
        """Whether this thread holds its frames back: it is in a block of `gathered`."""
        block = getattr(self._gathering, "block", None)
        return block is not None and block() is not None

    def gathered(self, send: Callable[[bool], None]) -> Gathered:
        """A block in which this thread holds its frames back. send(whether the block ended without an error): called at the end of
        the outermost one."""
        return Gathered(self._gathering, send)


class Gathered:
    """One block. The thread knows it weakly: an interrupt right at its begin leaves nothing behind."""

    __slots__ = ("__weakref__", "_gathering", "_outer", "_send")

    def __init__(self, gathering: threading.local, send: Callable[[bool], None]) -> None:
        self._gathering = gathering
        self._send = send
        self._outer: weakref.ref[Gathered] | None = None

    def __enter__(self) -> None:
        self._outer = getattr(self._gathering, "block", None)
        self._gathering.block = weakref.ref(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gathering.block = self._outer
        if self._outer is None or self._outer() is None:
            self._send(kind is None)
