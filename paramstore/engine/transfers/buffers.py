"""Memory beside the arenas of a namespace, lent by the host tier: what reads borrow, and what records make missed steps in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


class Staging:
    """Buffers that workers borrow for one piece at a time; there are as many as workers, so none ever waits."""

    def __init__(self) -> None:
        self._buffers: deque[memoryview] = deque()

    def add(self, buffer: memoryview) -> None:
        self._buffers.append(buffer)

    def borrow(self) -> memoryview:
        return self._buffers.pop()

    def give_back(self, buffer: memoryview) -> None:
        self._buffers.append(buffer)


@dataclass(slots=True)
class NamespaceBuffers:
    """The buffers of one namespace. advance: the free ones of a record each, in which an exact namespace makes missed steps."""

    staging: Staging = field(default_factory=Staging)
    advance: deque[memoryview] = field(default_factory=deque)


class Buffers:
    """The buffers of all namespaces that have memory, by name: the host tier lends them, transfers use them."""

    def __init__(self) -> None:
        self._lent: dict[str, NamespaceBuffers] = {}

    def lend(self, namespace: str) -> NamespaceBuffers:
        """Returns the namespace's buffers, still to be filled."""
        return self._lent.setdefault(namespace, NamespaceBuffers())

    def take_back(self, namespace: str) -> None:
        """Forgets the namespace's buffers, of which none may be in use."""
        self._lent.pop(namespace, None)

    def of(self, namespace: str) -> NamespaceBuffers:
        return self._lent[namespace]
