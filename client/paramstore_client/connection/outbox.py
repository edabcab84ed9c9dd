"""Frames on their way to the socket, in order, and which threads hold theirs back for a while.

Each call that sends wakes the daemon, which takes a core from whoever computes: so a thread may have its frames leave together.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

FRAMES_MAX = 64
"""Most frames of one call to the socket, far below what the system takes."""


class Outbox:
    """Owner of the frames that are not sent yet. Any thread and any finalizer adds; one sender at a time takes off."""

    def __init__(self) -> None:
        self._frames: deque[memoryview] = deque()
        self._gathering = threading.local()
        """`depth`: how many `gathered` blocks a thread is in."""

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
        """Whether this thread holds its frames back."""
        return getattr(self._gathering, "depth", 0) > 0

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within the block this thread holds its frames back; who else sends, and who waits, sends them too."""
        self._gathering.depth = getattr(self._gathering, "depth", 0) + 1
        try:
            yield
        finally:
            self._gathering.depth -= 1
