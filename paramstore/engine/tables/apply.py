"""Pushed gradients, and the claims of an apply: which records it updates, with which of them, and which still wait.

The claims of a plain apply are complete from the start. An *open* apply begins before its gradients are there, so its claims grow:
it claims a key when all ranks have pushed their last gradient of it, and the remaining keys when it is closed. The planner is the
only writer of the claims.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import Options
from paramstore.errors import ParamStoreError


class UploadMemory(Protocol):
    """A segment of a session's upload area."""

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class GradientRange:
    """The place of a rank's pending gradient of one key: `length_bytes` at `offset_bytes` of its session's upload area."""

    memory: UploadMemory
    offset_bytes: int
    length_bytes: int
    rank: int = 0

    def view(self) -> memoryview:
        return self.memory.view(self.offset_bytes, self.length_bytes)


Claimed = dict[ExpertKey, tuple[GradientRange, ...]]
"""The keys that an apply updates, each with its gradients, which are summed in this order; an empty tuple stands for zeros."""


@dataclass(slots=True, eq=False)
class Claims:
    """The keys that one apply updates. gradients: those of each claimed key; queue: keys that wait to be updated, next first."""

    options: Options
    grad_scale: float
    gradients: Claimed = field(default_factory=dict)
    queue: deque[ExpertKey] = field(default_factory=deque)
    is_open: bool = False
    """Whether more keys may be claimed."""
    error: ParamStoreError | None = None
    """Why the apply was given up; the updater then stops at its next record."""
    last_ranks: dict[ExpertKey, set[int]] = field(default_factory=dict)
    """For each key, the ranks that have pushed their last gradient of it."""
    ended_layers: dict[int, set[int]] = field(default_factory=dict)
    """For each layer, the ranks that push no more gradients of any of its keys."""
    read: set[ExpertKey] = field(default_factory=set)
    """Keys that have been updated: their gradients are not read any more."""
    awaited: set[ExpertKey] = field(default_factory=set)
    """Records in memory that are claimed, or probably will be, and wait for their update: to get a slot, the apply neither evicts
    them nor has them written. Slot requests that already wait when an open apply is closed go by the set from before."""
    waiters: list[object] = field(default_factory=list)
    """Futures of those who wait for a change of the claims; opaque to the planner."""
    room_waiters: list[object] = field(default_factory=list)
    """Futures of those who wait for `read` to grow, or for the apply to end."""
    outcome: object | None = None
    """Future of an open apply's result, or of the error with which it ended; None for a plain apply."""

    @property
    def has_begun(self) -> bool:
        """Whether the apply has claimed a key, or no more will come. Before that it has changed nothing."""
        return bool(self.gradients) or not self.is_open

    def done_ranks(self, key: ExpertKey) -> set[int]:
        """The ranks that push no more gradients of `key`."""
        return self.last_ranks.get(key, set()) | self.ended_layers.get(key[0], set())

    def take_room_waiters(self) -> list[object]:
        """Returns `room_waiters` and empties it."""
        taken, self.room_waiters = self.room_waiters, []
        return taken
