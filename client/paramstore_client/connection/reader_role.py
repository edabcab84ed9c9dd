"""The role of the one thread that reads a connection's answers, and the waiting of the others.

- Who takes the role has a token, a list of one item, and ends the role by emptying it in a `finally`: that is one call of C, so
  that no interrupt leaves the role taken by nobody.
- Who waits is told when something was read, and when the reader leaves. An interrupt may keep that from being told: who waits
  looks every LOOK_S by itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat

LOOK_S = 0.5
"""Longest time for which an interrupt in a thread that leaves the role keeps the others from taking it."""

Token = list[bool]
"""The right to read, while it has an item."""
Lock = type(threading.Lock())


class ReaderRole:
    """Owner of who reads, and of those who wait for it. waited_s: seconds that all of them have waited, as they note it."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._token: Token = []
        """That of the thread that reads, or was the last to."""
        self._taking = threading.RLock()
        """Reentrant, as a signal's handler may wait for an answer while its thread is in here."""
        self._waiting: deque[threading.Lock] = deque()

    @property
    def is_taken(self) -> bool:
        """Whether somebody reads."""
        return bool(self._token)

    def try_take(self, token: Token) -> bool:
        """Takes the role, if nobody has it, until `token` is emptied."""
        with self._taking:
            if not self._token:
                self._token = token
        return self._token is token

    def had(self, token: Token) -> bool:
        """Whether the role was taken with `token`, and by nobody since."""
        return self._token is token

    def await_change(self, timeout_s: float, is_over: Callable[[], bool]) -> None:
        """Waits until something was read or the role is free; at most LOOK_S, and not at all once `is_over()`."""
        turn = threading.Lock()
        turn.acquire()
        self._waiting.append(turn)
        if self._token and not is_over():
            turn.acquire(timeout=min(timeout_s, LOOK_S))
        with suppress(ValueError):
            self._waiting.remove(turn)

    def tell(self) -> None:
        """Tells those who wait to look again, each within one call of C."""
        waiting = self._waiting
        with suppress(IndexError):  # who has looked by itself is gone from the list
            deque(map(Lock.release, map(deque[threading.Lock].popleft, repeat(waiting, len(waiting)))), 0)
