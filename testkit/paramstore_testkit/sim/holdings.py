"""What a client of the simulation has: requests under way, open namespaces, leases, upload memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paramstore_testkit.sim.model import Image, Key, NamespaceModel
from paramstore_testkit.sim.net import SimSegment

PAGE_BYTES = 4096


@dataclass(slots=True)
class Asked:
    """A request under way."""

    kind: str
    done: Callable[[Any], None] | None
    failed: Callable[[str], None] | None
    allowed: frozenset[str]
    due_s: float
    view: ClientView | None
    is_exclusive: bool
    turn: int = -1
    """Turn of the loop in which it reached the core."""


@dataclass(slots=True, eq=False)
class ClientView:
    """One opening of a namespace. steps: the steps on which a reader has stood; none for a writer. openings: number of writers'
    openings that had reached the core when this one was answered; has_rivals: whether another one was under way then."""

    handle: int
    model: NamespaceModel
    steps: list[int]
    slots: int
    openings: int
    has_rivals: bool
    is_lost: bool = False
    """Whether it was closed, fenced or refused: then only its leases count."""

    @property
    def is_writer(self) -> bool:
        return not self.steps

    @property
    def step(self) -> int | None:
        return self.steps[-1] if self.steps else None

    @property
    def is_fenced(self) -> bool:
        """Whether another writer may have taken over."""
        return self.is_writer and (self.has_rivals or self.model.openings > self.openings)


@dataclass(slots=True)
class Lease:
    """Granted bytes: for each key the memory, and the bytes that it must keep."""

    view: ClientView
    copies: list[tuple[Key, memoryview, bytes]]
    segments: frozenset[int]


@dataclass(slots=True)
class Upload:
    """The session's writable memory, in pages. free: numbers of the pages that nobody uses. pushed: first page of each pending
    gradient."""

    segment: int
    memory: SimSegment
    free: list[int] = field(default_factory=list)
    pushed: dict[Key, int] = field(default_factory=dict)

    def take(self, image: Image) -> int | None:
        """Takes pages in a row that nobody uses; gives the first."""
        count = image.length_bytes // PAGE_BYTES
        for index in range(len(self.free) - count + 1):
            if self.free[index + count - 1] - self.free[index] == count - 1:
                first = self.free[index]
                del self.free[index : index + count]
                return first
        return None

    def give_back(self, first: int, image: Image) -> None:
        self.free = sorted([*self.free, *range(first, first + image.length_bytes // PAGE_BYTES)])

    def view(self, first: int, image: Image) -> memoryview:
        return self.memory.view(first * PAGE_BYTES, image.length_bytes)
