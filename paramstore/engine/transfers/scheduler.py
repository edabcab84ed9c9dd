"""Decides which transfer gets the next free worker of a lane: one volume's workers, or the CPU's. Pure decisions.

Transfers go by class (demand, prefetch, write-back), then deadline, then first come. A transfer goes in pieces, so an urgent one
never waits for more than the pieces under way. A worker takes a *burst* of pieces, as many as leave the other free workers their
share, because each hand-over costs 0.1 ms; the last transfer in a queue is spread over all workers, piece by piece. A burst may
hold several *light* transfers, each of one small piece: moving a record of 0.3 MB takes less time than its hand-over. Reads of one
piece start in their order as long as few bytes of them are under way: all at once would all end at the end, and whoever computes
with the first ones would wait for the last. What somebody waits for never waits for what nobody does. Such reads have a queue of
their own, so that the free workers may take what else waits while they may not begin. Raising a queued transfer re-queues it; the
stale entry is skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

from paramstore.engine.tables.requests import Urgency
from paramstore.errors import ParamStoreError

Piece = Any
"""A piece of a transfer, which its `run` understands; opaque here."""
BURST_PIECES = 2
"""Pieces one worker takes at once, at most: 32 MiB of the default size, 8 ms of a fast disk."""
LIGHT_BURST_BYTES = 4 << 20
"""Bytes of the light transfers that one worker takes at once, at most: a millisecond of a fast disk."""
LIGHT_BURST_TRANSFERS = 64
"""Light transfers that one worker takes at once, at most, of however few bytes: 5 ms of calls to a fast disk, for which an urgent
one may have to wait."""
LIGHT_READ_BYTES = 40 << 20
"""Bytes of light reads under way in a lane, of those that somebody waits for, from which on no other such begins: 4 of 8 MB at once
take as long as 8, and come earlier."""
AHEAD_READ_BYTES = 24 << 20
"""Bytes of light reads under way in a lane from which on none begins that nobody waits for: demand finds few before it."""


@dataclass(slots=True, eq=False)
class Transfer:
    """A move under way. `run(piece)` is called in a worker for each of `pieces`, in parallel, then for `final` alone.

    running: bursts in workers now. light_bytes: size of a transfer that is one piece (or only `final`) and may share a burst with
    others; 0 for any other. is_read: whether it brings a record that somebody may wait for.

    settle(transfer): called once on the loop thread when nothing runs any more; `error` tells how it went.
    """

    lane: Hashable
    urgency: Urgency
    run: Callable[[Piece], Any]
    pieces: deque[Piece]
    settle: Callable[[Transfer], None]
    final: Piece | None = None
    deadline_s: float | None = None
    light_bytes: int = 0
    is_read: bool = False
    is_progress: bool = True
    """Whether its end counts as progress for those who wait on the store; False for scrubs, which run beside all work."""
    results: list[Any] = field(default_factory=list)
    error: ParamStoreError | None = None
    running: int = 0
    order: int = 0
    is_cancelled: bool = False
    is_settled: bool = False

    @property
    def has_piece(self) -> bool:
        """Whether a worker could start on it now."""
        return self.error is None and (bool(self.pieces) or (self.final is not None and self.running == 0))

    def take_burst(self, free_workers: int, *, is_last: bool) -> list[Piece]:
        if self.pieces:
            count = 1 if is_last else min(BURST_PIECES, -(-len(self.pieces) // free_workers))
            return [self.pieces.popleft() for _ in range(count)]
        final, self.final = self.final, None
        return [final]

    @property
    def is_over(self) -> bool:
        return self.running == 0 and not self.has_piece

    @property
    def is_light_read(self) -> bool:
        return self.is_read and self.light_bytes > 0


@dataclass(slots=True)
class LaneStats:
    """How many transfers of a lane are queued, and how many of its bursts are running, for `status`."""

    queued: int = 0
    running: int = 0


Burst = list[tuple[Transfer, list[Piece]]]
"""The pieces that one worker takes at once: those of one transfer, or several light ones."""
Outcome = tuple[list[Any] | None, ParamStoreError | None]
"""Results of the pieces of one transfer in a burst, or the error that ended them."""
Entry = tuple[int, float, int, Transfer]
"""(class, deadline, order, transfer), by which a queue is sorted."""


@dataclass(slots=True)
class _Lane:
    """What waits and what runs in a lane."""

    limit: int
    """Bursts that may be under way."""
    running: int = 0
    reads: dict[Transfer, int] = field(default_factory=dict)
    """Bytes of the light reads in each burst under way, by its first transfer, which has the burst's class."""
    light_reads: list[Entry] = field(default_factory=list)
    others: list[Entry] = field(default_factory=list)

    @property
    def entries(self) -> int:
        """Length of both queues, stale entries too."""
        return len(self.light_reads) + len(self.others)

    def queue_of(self, transfer: Transfer) -> list[Entry]:
        return self.light_reads if transfer.is_light_read else self.others

    @property
    def may_read(self) -> bool:
        """Whether the light read whose turn it is may begin. Demand waits for demand alone."""
        read = _first(self.light_reads)
        if read is None or read[3].urgency is not Urgency.DEMAND:
            return sum(self.reads.values()) < AHEAD_READ_BYTES
        return sum(count for first, count in self.reads.items() if first.urgency is Urgency.DEMAND) < LIGHT_READ_BYTES

    def first(self, *, may_read: bool) -> Transfer | None:
        """The transfer whose turn it is; may_read: whether a light read may begin."""
        other = _first(self.others)
        read = _first(self.light_reads) if may_read else None
        entry = other if read is None else read if other is None else min(read, other)
        return None if entry is None else entry[3]

    def take_pieces(self, transfer: Transfer, free_workers: int) -> list[Piece]:
        """Takes a burst's pieces of `transfer`, which is the first in its queue."""
        pieces = transfer.take_burst(free_workers, is_last=self.entries == 1)
        if not transfer.pieces:
            heappop(self.queue_of(transfer))  # a final piece is queued again when the others are done
        transfer.running += 1
        return pieces


class Scheduler:
    """Queues the transfers of all lanes. Owner of `Transfer.running`, `pieces` and `order`."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, _Lane] = {}
        self._order = 0

    def add_lane(self, lane: Hashable, workers: int, *, ahead: int = 0) -> None:
        """Adds a lane. ahead: bursts handed over before a worker is free, so that a worker finds its next one at once instead of
        after a turn of the loop (0.2 to 0.4 ms). Urgent transfers wait for those bursts too."""
        self._lanes[lane] = _Lane(workers + ahead)

    def submit(self, transfer: Transfer) -> None:
        self._order += 1
        transfer.order = self._order
        self._queue(transfer)

    def _queue(self, transfer: Transfer) -> None:
        deadline_s = inf if transfer.deadline_s is None else transfer.deadline_s
        queue = self._lanes[transfer.lane].queue_of(transfer)
        heappush(queue, (transfer.urgency, deadline_s, transfer.order, transfer))

    def promote(self, transfer: Transfer, urgency: Urgency) -> None:
        """Raises a transfer's class; pieces under way go on. Never lowers it."""
        if urgency < transfer.urgency:
            transfer.urgency = urgency
            if transfer.has_piece:
                self._queue(transfer)

    def cancel(self, transfer: Transfer) -> bool:
        """Takes a transfer of which no piece has started out of its queue: True, and the caller settles it. Else False."""
        if transfer.is_cancelled or transfer.is_settled or transfer.running or transfer.results:
            return False
        transfer.pieces.clear()
        transfer.final = None
        transfer.is_cancelled = True
        return True

    def next_burst(self, lane: Hashable) -> Burst | None:
        """Takes the most urgent pieces for one worker, which then count as running; None if all are busy, or nothing waits but
        light reads of which enough are under way."""
        at = self._lanes[lane]
        free_workers = at.limit - at.running
        if free_workers <= 0:
            return None
        may_read = at.may_read
        transfer = at.first(may_read=may_read)
        if transfer is None:
            return None
        burst = [(transfer, at.take_pieces(transfer, free_workers))]
        if transfer.light_bytes:
            self._join_light(at, burst, may_read=may_read)
        at.running += 1
        at.reads[transfer] = sum(read.light_bytes for read, _ in burst if read.is_read)
        return burst

    @staticmethod
    def _join_light(at: _Lane, burst: Burst, *, may_read: bool) -> None:
        """Adds the next light transfers of the same class: as many as leave each worker of the lane its share of what may begin."""
        first, _ = burst[0]
        waiting = at.entries if may_read else len(at.others)
        share = -(-(waiting + 1) // at.limit)
        room_bytes = LIGHT_BURST_BYTES - first.light_bytes
        while len(burst) < min(share, LIGHT_BURST_TRANSFERS) and (transfer := at.first(may_read=may_read)) is not None:
            if transfer.urgency is not first.urgency or not 0 < transfer.light_bytes <= room_bytes:
                return
            room_bytes -= transfer.light_bytes
            burst.append((transfer, at.take_pieces(transfer, 1)))

    def finish_burst(self, lane: Hashable, burst: Burst, outcomes: list[Outcome]) -> list[Transfer]:
        """Takes note that a worker of `lane` has finished; returns the transfers that are over and must be settled."""
        at = self._lanes[lane]
        at.running -= 1
        at.reads.pop(burst[0][0], None)
        over = []
        for (transfer, _), (results, error) in zip(burst, outcomes, strict=True):
            transfer.running -= 1
            if error is not None:
                transfer.error = transfer.error or error
                transfer.pieces.clear()
                transfer.final = None
            else:
                transfer.results.extend(results or ())
            if transfer.is_over:
                transfer.is_settled = True
                over.append(transfer)
            elif not transfer.pieces and transfer.final is not None and transfer.running == 0:
                self._queue(transfer)
        return over

    def stats(self) -> dict[Hashable, LaneStats]:
        """Figures for each lane, for people; counted when asked."""
        return {
            lane: LaneStats(queued=sum(map(_is_in_force, (*at.light_reads, *at.others))), running=at.running)
            for lane, at in self._lanes.items()
        }


def _first(queue: list[Entry]) -> Entry | None:
    """The entry whose turn it is in `queue`, from which stale entries before it are removed."""
    while queue and not _is_in_force(queue[0]):
        heappop(queue)
    return queue[0] if queue else None


def _is_in_force(entry: Entry) -> bool:
    """Whether a queue's entry still counts: not if its transfer was raised since, or has nothing left to start."""
    urgency, _, _, transfer = entry
    return urgency == transfer.urgency and transfer.has_piece
