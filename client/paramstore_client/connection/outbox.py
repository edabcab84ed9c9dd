"""Frames on their way to the socket, in order, and which threads hold theirs back for a while.

Each call that sends wakes the daemon, which takes a core from whoever computes: so a thread may have its frames leave together.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import call
from types import TracebackType

FRAMES_MAX = 64
"""Most frames of one call to the socket, far below what the system takes."""


NOTHING = partial(bool)
"""A function of C that does nothing."""


class Outbox:
    """Owner of the frames that are not sent yet. Any thread and any finalizer adds; one sender at a time takes off."""

    def __init__(self) -> None:
        self._frames: deque[memoryview] = deque()
        self._book: tuple[deque[int], deque[memoryview]] = deque(), deque()
        """What each call has sent, and the frames that were taken off for it. Each is noted within one call of C, where no handler
        of a signal runs: so an interrupt loses no count, and no frame goes out twice."""
        self._gathering = threading.local()
        """`block`: the innermost `Gathered` that a thread is in."""

    def __bool__(self) -> bool:
        return bool(self._frames)

    def add(self, frame: bytes | bytearray, note: Callable[[], object] = NOTHING) -> None:
        """Puts a frame behind the others. Takes no lock. note: a function of C, called in the same step."""
        steps: tuple[Callable[[], object], ...] = note, partial(self._frames.append, memoryview(frame))
        deque(map(call, steps), 0)

    def first(self) -> list[memoryview]:
        """What goes out next, in one call."""
        offset_bytes, frames = self._take_off(), self._frames
        first = [frames[place] for place in range(min(len(frames), FRAMES_MAX))]
        if offset_bytes:
            first[0] = first[0][offset_bytes:]
        return first

    def send(self, sendmsg: Callable[[Sequence[memoryview]], int]) -> bool:
        """Sends what the socket takes, by calls of `sendmsg`, its own. False where it is full, or takes no more for good: nothing
        is left here then. Raises only what a signal's handler raises; what was sent by then is known."""
        while first := self.first():
            try:
                self._book[0].extend(map(sendmsg, (first,)))
            except OSError as error:
                if error.errno is None:  # a signal's handler raised it: TimeoutError, mostly
                    raise
                if not isinstance(error, BlockingIOError):
                    # The daemon is gone. What it still said is read first, and the end of the stream settles the rest.
                    self.clear()
                return False
        return True

    def _take_off(self) -> int:
        """Takes off what was sent whole; gives how many bytes of the first frame that is left were sent."""
        frames, (sent, gone) = self._frames, self._book
        offset_bytes = sum(sent) - sum(map(len, gone))
        while offset_bytes and offset_bytes >= len(frames[0]):
            offset_bytes -= len(frames[0])
            gone.extend(map(deque[memoryview].popleft, (frames,)))
        if not offset_bytes:
            self._book = deque(), deque()
        return offset_bytes

    def clear(self) -> None:
        """Drops everything: nobody will read it."""
        self._book = deque(), deque()  # first: it tells of frames that are there
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
