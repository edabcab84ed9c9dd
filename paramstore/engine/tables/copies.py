"""The planner's tables of one key: its working copy, its `param` copies, and who waits for them.

Plain data. The planner is the only writer; everybody else reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paramstore.core.apply_log import ApplyLog
from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent, Identity, Located
from paramstore.core.optimizers import Options
from paramstore.core.residency import Copy, Working
from paramstore.core.slices import SLICE
from paramstore.engine.tables.counters import CommitProgress
from paramstore.errors import ParamStoreError


class Waiter(Protocol):
    """A request that waits for copies. Each method counts how one of them ended, and says whether the request waits no more."""

    is_finished: bool
    """Whether it waits no more; written by the planner."""
    future: object | None
    """Future of whoever awaits it; opaque to the planner."""

    def land(self, copy: WorkingCopy | ParamCopy, bytes_loaded: int) -> bool:
        """Counts `copy`, whose bytes are in its slot now. bytes_loaded: their number."""
        ...

    def fail(self, copy: WorkingCopy | ParamCopy, error: ParamStoreError) -> bool:
        """Counts `copy`, whose bytes will not come, for `error`."""
        ...

    def skip(self, copy: WorkingCopy | ParamCopy) -> bool:
        """Counts `copy`, which was given up since nobody uses it any more."""
        ...


class WriteFailures(NamedTuple):
    """Writes that have failed of a record as it is now, each on another extent. volume: that of the last; the next write goes to
    another one, if there is one with space."""

    tries: int
    error: Exception | None
    volume: int | None


NO_FAILURES = WriteFailures(0, None, None)


class WorkingCopy:
    """One key's working copy of the stored part. State changes go through `core.residency` only."""

    __slots__ = (
        "current", "cut_record", "holders", "identity", "is_moving", "is_orphan", "key", "last_apply", "optimizer_step",
        "prefetches", "publish_in", "queued", "requests", "reserved", "slot", "state", "target", "uncommitted", "waiters",
        "write_failures",
    )  # fmt: skip

    def __init__(self, key: ExpertKey, identity: Identity | None) -> None:
        self.key = key
        self.state = Working.ABSENT
        self.slot: int | None = None
        self.identity = identity
        """Identity of the newest bytes that exist; None before `initialize`."""
        self.target = identity
        """Identity of the bytes once every apply called so far has run; in an exact namespace, every one that claimed this key."""
        self.uncommitted: Located | None = None
        """The newest whole record on a volume that no step has published."""
        self.publish_in: int | None = None
        """Sequence of the commit that is to publish its newest identity; None where one has, or where its cut has the record."""
        self.cut_record: Located | None = None
        """Its record in the cut under way, whose extent stays until that is settled."""
        self.reserved: Extent | None = None
        """The extent that the next write-back goes to."""
        self.optimizer_step = 0
        self.last_apply = 0
        self.holders = 0
        """Number of readers of the slot; above 0 it is neither updated nor evicted."""
        self.is_orphan = False
        """Whether a rollback discarded it while a worker or holder used the slot, which is freed when the last returns."""
        self.current: ParamCopy | None = None
        """The `param` copy that the writer sees, if there is one; in an exact namespace, the one it saw when it last asked."""
        self.is_moving = False
        """Whether a load, update or write is under way."""
        self.requests: list[Waiter] = []
        """Requests that wait for the load or update under way to land, and hold the slot then."""
        self.prefetches: list[Waiter] = []
        """Requests that wait for it to land, and hold nothing."""
        self.waiters: list[object] = []
        """Futures of those who wait for any change of this copy; opaque to the planner."""
        self.write_failures = NO_FAILURES
        self.queued: Queued | None = None
        """Its place in the queue of its state; None while it is ABSENT."""


class ParamCopy:
    """One immutable copy of a key's `param` part. The policy knows it by its key, so use counts outlive versions."""

    __slots__ = (
        "base", "identity", "is_moving", "key", "leases", "located", "missed", "place", "slot", "state", "waiters",
    )  # fmt: skip

    def __init__(
        self, key: ExpertKey, identity: Identity, slot: int, located: Located | None, *, segment: int, offset_bytes: int,
        base: Identity | None = None, missed: tuple[Options, ...] = (),
    ) -> None:  # fmt: skip
        self.key = key
        self.identity = identity
        self.base = identity if base is None else base
        """Identity of the record that it is made from: differs from `identity` where that record has missed steps."""
        self.missed = missed
        """Options of the missed steps between `base` and `identity`."""
        self.state = Copy.ABSENT
        self.slot = slot
        self.place = (segment, offset_bytes, *identity)
        """(segment, offset, epoch, version): tells a lease's client where the bytes are, and their identity."""
        self.located = located
        """The extent that holds exactly `base`, where one is known; else the working copy makes it."""
        self.leases = 0
        self.is_moving = False
        """Whether its load is under way; not while it is LOADING and waits for the working copy."""
        self.waiters: list[Waiter] = []

    @property
    def has_landed(self) -> bool:
        """Whether its bytes are in the slot. (It may have retired before they were.)"""
        return self.state is not Copy.LOADING and not self.is_moving and not self.waiters

    @property
    def is_waiting(self) -> bool:
        """Whether its bytes have not landed and no move brings them: it waits for the working copy."""
        return not self.is_moving and (self.state is Copy.LOADING or bool(self.waiters))


@dataclass(slots=True)
class Cut:
    """The records that one commit publishes, fixed at the cut. Which of them it waits for stands with each record: no table grows
    with their number, which would hold the loop."""

    sequence: int
    applies: int
    records: list[WorkingCopy]
    unwritten: int
    """How many of them it waits for."""
    passed: int = 0
    """It waits for none of the first so many, and perhaps of some more."""
    log: ApplyLog = field(default_factory=ApplyLog)
    """Apply log of the step: which steps its records may have missed."""
    progress: CommitProgress | None = None
    written: object | None = None
    """Future of the commit, which waits until nothing is unwritten or one of its writes has failed; opaque to the planner."""

    def awaits(self, working: WorkingCopy) -> bool:
        """Whether the cut is to have its newest identity, and has not: what is written of it next belongs to the cut."""
        return working.publish_in == self.sequence

    def keep(self, working: WorkingCopy, located: Located) -> None:
        """Keeps what it has awaited: the record is whole in `located`, whose extent stays until the cut is settled."""
        working.publish_in, working.cut_record = None, located
        self.unwritten -= 1
        end = min(self.passed + SLICE, len(self.records))  # no more in one turn of the loop
        while self.passed < end and not self.awaits(self.records[self.passed]):
            self.passed += 1

    def awaited(self) -> Iterator[WorkingCopy]:
        """Those of its records that it waits for when their turn comes."""
        rest = (self.records[number] for number in range(self.passed, len(self.records)))
        return (working for working in rest if self.awaits(working))

    def located(self) -> dict[ExpertKey, Located]:
        """Where those of its records are that are on a volume."""
        return {working.key: record for working in self.records if (record := working.cut_record) is not None}


class Queued:
    """A working copy's place in a queue, between two others."""

    __slots__ = ("newer", "older", "working")

    def __init__(self, working: WorkingCopy | None = None) -> None:
        self.working = working
        self.older = self.newer = self


class Queue:
    """Working copies in the order in which they came, each in one queue at most. They are linked to each other: any of them leaves
    at once, and no table grows with their number. Not to be changed while it is iterated."""

    def __init__(self) -> None:
        self._ends = Queued()
        """Stands before the oldest and behind the newest."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[WorkingCopy]:
        place = self._ends.newer
        while place.working is not None:
            yield place.working
            place = place.newer

    def __reversed__(self) -> Iterator[WorkingCopy]:
        place = self._ends.older
        while place.working is not None:
            yield place.working
            place = place.older

    def take_in(self, working: WorkingCopy) -> None:
        """Puts it, which is in no queue, behind all others."""
        place = working.queued = Queued(working)
        place.older, place.newer = self._ends.older, self._ends
        place.older.newer = place.newer.older = place
        self._count += 1

    def let_out(self, working: WorkingCopy) -> None:
        """Takes it, which is in this queue, from wherever it stands."""
        place, working.queued = working.queued, None
        assert place is not None
        place.older.newer, place.newer.older = place.newer, place.older
        self._count -= 1


class ResidencyTable:
    """The working copies and the `param` copies of one namespace. Every key has a working copy, most of them ABSENT."""

    def __init__(self) -> None:
        self.working: dict[ExpertKey, WorkingCopy] = {}
        self.resident: dict[ExpertKey, WorkingCopy] = {}
        """Working copies that have a slot; the one that has had it longest is first."""
        self.in_state = {state: Queue() for state in Working if state is not Working.ABSENT}
        """Working copies that have a slot, by state; in each state the one that has been in it longest is first."""
        self.copies: dict[ExpertKey, list[ParamCopy]] = {}
        self.prefetched: set[ParamCopy] = set()
        """Copies that were loaded ahead of use and not used yet."""

    def find_copy(self, key: ExpertKey, identity: Identity) -> ParamCopy | None:
        for copy in self.copies.get(key, ()):
            if copy.identity == identity:
                return copy
        return None
