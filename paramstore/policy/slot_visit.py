"""The values of a plan for slots: what stands in one, what a visit finds and needs, and what is counted.

`SlotPlan` alone writes them, and whoever carries a plan out reads them, and notes the bytes that loads ahead brought.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class SlotCounts:
    """Keys since the plan was made. hits + late + misses + passed = keys of all visits; each miss, each passing and each key of
    `ahead` is one load. useful: loaded ahead and visited then, late ones too; wasted: gone before any visit. ahead_bytes: what
    loads ahead have brought into host memory, as the host says; of those under way none."""

    hits: int = 0
    late: int = 0
    misses: int = 0
    passed: int = 0
    ahead: int = 0
    useful: int = 0
    wasted: int = 0
    evicted: int = 0
    dropped: int = 0
    failed: int = 0
    ahead_bytes: int = 0

    def take_back_hit(self) -> None:
        """Counts a useful hit as a miss: what was loaded ahead was gone again before its visit."""
        self.hits -= 1
        self.useful -= 1
        self.misses += 1
        self.wasted += 1

    @property
    def loads(self) -> int:
        """Loads that were decided, those that failed among them."""
        return self.misses + self.passed + self.ahead


class Held:
    """A key that stands in a slot, or is on its way there. One object for each load: a key that comes again gets another."""

    __slots__ = ("is_ahead", "is_awaited", "is_gone", "is_passing", "is_ready", "is_spare", "is_unproven", "key", "users")

    def __init__(self, key: Hashable, *, is_ahead: bool) -> None:
        self.key = key
        self.is_ahead = is_ahead
        self.is_awaited = is_ahead
        """Whether its layer's visit, for which it was loaded ahead, is still to come."""
        self.is_ready = False
        self.is_unproven = False
        """Whether it was loaded ahead and counted as a hit, and nobody has seen the bytes yet."""
        self.is_gone = False
        self.is_passing = False
        """Whether it goes once the visit that it passes by for has used it."""
        self.is_spare = False
        """Whether it passed by and stays in a slot that nobody needed: what is loaded ahead may have it."""
        self.users = 0
        """Visits under way that use it."""

    def __repr__(self) -> str:
        state = "gone" if self.is_gone else "ready" if self.is_ready else "under way"
        return f"<Held {self.key!r}, {state}, {self.users} users>"


@dataclass(slots=True, eq=False)
class SlotVisit:
    """What one visit finds and needs; its `held` are in use, and `passing_slots` slots kept free for it, until `end_visit`.

    held: in the order of the visit's keys, without those that pass. loads: those of `held` that are to be loaded now. passing: keys
    to be run through `passing_slots` slots, as many at a time (`let_in`, `let_out`). through: those of them that have a slot now,
    and what was loaded ahead and passes. evicted: what gave room. ahead_ready, ahead_late: keys loaded ahead of it, not of an
    earlier visit of its layer, whose bytes had come, or had not.
    """

    held: Sequence[Held]
    loads: tuple[Held, ...] = ()
    passing: tuple[Hashable, ...] = ()
    passing_slots: int = 0
    evicted: tuple[Held, ...] = ()
    through: list[Held] = field(default_factory=list)
    waiting: deque[Hashable] = field(default_factory=deque)
    ahead_ready: int = 0
    ahead_late: int = 0
    is_over: bool = False
