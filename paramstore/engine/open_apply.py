"""The claims of an apply: which records it updates, with which gradients, and which of them still wait for their update.

The claims of a plain apply are complete from the start. An *open* apply begins before its gradients are there, so its claims grow:
it claims a key when all ranks have pushed their last gradient of it, and the remaining keys when it is closed. The planner is the
only writer of the claims; the updater takes keys from the queue.
"""

from __future__ import annotations

from asyncio import Future
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import Options
from paramstore.engine.gradients import Claimed
from paramstore.errors import ParamStoreError

HOT_SHARE = 0.5
"""An open apply awaits records in memory with at least this share of the heat of the hottest one."""


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
    outcome: Future[dict[str, int] | ParamStoreError] | None = None
    """Result of an open apply, or the error with which it ended; None for a plain apply."""

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


def awaited_keys(heat: dict[ExpertKey, float], limit: int) -> set[ExpertKey]:
    """Chooses the records that an open apply awaits: the hottest of those in memory, at most `limit`. heat: of each of these."""
    least = HOT_SHARE * max(heat.values(), default=0.0)
    hottest: Iterable[ExpertKey] = sorted((key for key in heat if heat[key] >= least), key=heat.__getitem__, reverse=True)
    return set(list(hottest)[: max(0, limit)])
