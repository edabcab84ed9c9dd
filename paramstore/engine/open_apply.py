"""An apply's claims: which records it updates, with which gradients, and which of them nobody has taken up yet.

Those of an *open* apply grow: it was begun before its gradients were there, and claims a key when all ranks have pushed their last
gradient of it. What is left is claimed when it is closed. Those of a plain apply are complete from the start. The planner is
the only writer of the claims; the updater takes keys from the queue.
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
"""Of the heat of the hottest record in memory: those above it are awaited by an open apply."""


@dataclass(slots=True, eq=False)
class Claims:
    """What one apply updates. gradients: per key claimed; queue: those that wait to be updated, next first."""

    options: Options
    grad_scale: float
    gradients: Claimed = field(default_factory=dict)
    queue: deque[ExpertKey] = field(default_factory=deque)
    is_open: bool = False
    """Whether more may come."""
    error: ParamStoreError | None = None
    """Why it came to no end: the updater stops at its next record."""
    last_ranks: dict[ExpertKey, set[int]] = field(default_factory=dict)
    """Per key the ranks that have pushed their last gradient of it."""
    ended_layers: dict[int, set[int]] = field(default_factory=dict)
    """Per layer the ranks that push no more gradients of any of its keys."""
    read: set[ExpertKey] = field(default_factory=set)
    """Keys whose update is made: their gradients are read no more."""
    awaited: set[ExpertKey] = field(default_factory=set)
    """Records in memory that are claimed, or probably will be, and wait for their update: the apply evicts none of them, nor has
    them written for a slot. Requests that wait when an open one is closed still go by what it awaited before."""
    waiters: list[object] = field(default_factory=list)
    """Futures of those who wait for a change of it; opaque to the planner."""
    room_waiters: list[object] = field(default_factory=list)
    """Futures of those who wait for `read` to grow, or for its end."""
    outcome: Future[dict[str, int] | ParamStoreError] | None = None
    """Of an apply that was open: its result, or why there is none."""

    @property
    def has_begun(self) -> bool:
        """Whether there is something to do or nothing more will come: until then it has changed nothing."""
        return bool(self.gradients) or not self.is_open

    def done_ranks(self, key: ExpertKey) -> set[int]:
        """The ranks that push no more gradients of `key`."""
        return self.last_ranks.get(key, set()) | self.ended_layers.get(key[0], set())

    def take_room_waiters(self) -> list[object]:
        """`room_waiters`, who wait no longer."""
        taken, self.room_waiters = self.room_waiters, []
        return taken


def awaited_keys(heat: dict[ExpertKey, float], limit: int) -> set[ExpertKey]:
    """Of the records in memory, each with its heat, those that an open apply awaits: the hottest, at most `limit`."""
    least = HOT_SHARE * max(heat.values(), default=0.0)
    hottest: Iterable[ExpertKey] = sorted((key for key in heat if heat[key] >= least), key=heat.__getitem__, reverse=True)
    return set(list(hottest)[: max(0, limit)])
