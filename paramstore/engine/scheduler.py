"""Which transfer gets the next free worker of a lane. Pure decisions: a lane is one volume's workers, or the CPU's.

Order: class (demand, prefetch, write-back), then deadline, then first come. A transfer goes in pieces, so an urgent one
never waits for more than the pieces under way. In a queue, a worker takes a *burst* of them, as many as leave the other
free workers their share: one hand-over (0.1 ms) for several pieces. The last record in it is moved by all, piece by piece.
Of *light* transfers, each of one small piece, a burst holds several: a record of 0.3 MB takes less time than its hand-over.
Raising a queued transfer re-queues it; the stale entry is skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

from paramstore.engine.requests import Urgency
from paramstore.errors import ParamStoreError

Piece = Any
"""What a transfer's `run` understands; opaque here."""
BURST_PIECES = 2
"""Pieces one worker takes at once, at most: 32 MiB of the default size, 8 ms of a fast disk."""
LIGHT_BURST_BYTES = 4 << 20
"""Light transfers one worker takes at once have no more bytes than this together: a millisecond of a fast disk."""


@dataclass(slots=True, eq=False)
class Transfer:
    """A move under way. `run(piece)` is called in a worker for each of `pieces`, in parallel, then for `final` alone.

    running: bursts in workers now. light_bytes: of the whole transfer, if it is one piece (or only `final`) that may share a
    burst with others; 0 if not.

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
    is_progress: bool = True
    """Whether its end shows those who wait that the store goes on; not what looks at the volumes beside all work."""
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


@dataclass(slots=True)
class LaneStats:
    """Busy pieces now, and what has waited: for `status`."""

    queued: int = 0
    running: int = 0


Burst = list[tuple[Transfer, list[Piece]]]
"""What one worker takes at once: pieces of one transfer, or several light ones."""
Outcome = tuple[list[Any] | None, ParamStoreError | None]
"""What the pieces of one transfer in a burst gave, or the error that ended them."""
Entry = tuple[int, float, int, Transfer]
"""(class, deadline, order, transfer): how a queue is sorted."""


class Scheduler:
    """Queues of all lanes. Owner of `Transfer.running`, `pieces` and `order`."""

    def __init__(self) -> None:
        self._limits: dict[Hashable, int] = {}
        self._running: dict[Hashable, int] = {}
        self._queues: dict[Hashable, list[Entry]] = {}
        self._order = 0

    def add_lane(self, lane: Hashable, workers: int, *, ahead: int = 0) -> None:
        """ahead: bursts handed over before a worker is free, so that one that is done finds the next at once instead of
        after a turn of the loop (0.2 to 0.4 ms). What is urgent waits for those too."""
        self._limits[lane] = workers + ahead
        self._running[lane] = 0
        self._queues[lane] = []

    def submit(self, transfer: Transfer) -> None:
        self._order += 1
        transfer.order = self._order
        self._queue(transfer)

    def _queue(self, transfer: Transfer) -> None:
        deadline_s = inf if transfer.deadline_s is None else transfer.deadline_s
        heappush(self._queues[transfer.lane], (transfer.urgency, deadline_s, transfer.order, transfer))

    def promote(self, transfer: Transfer, urgency: Urgency) -> None:
        """Raises a transfer's class; pieces under way go on. Never lowers it."""
        if urgency < transfer.urgency:
            transfer.urgency = urgency
            if transfer.has_piece:
                self._queue(transfer)

    def cancel(self, transfer: Transfer) -> bool:
        """True if no piece had started: the transfer will not run, and the caller settles it."""
        if transfer.is_cancelled or transfer.is_settled or transfer.running or transfer.results:
            return False
        transfer.pieces.clear()
        transfer.final = None
        transfer.is_cancelled = True
        return True

    def next_burst(self, lane: Hashable) -> Burst | None:
        """The most urgent pieces for one worker, now counted as running; None if all workers are busy or nothing waits."""
        free_workers = self._limits[lane] - self._running[lane]
        if free_workers <= 0:
            return None
        queue = self._queues[lane]
        transfer = _first(queue)
        if transfer is None:
            return None
        burst = [(transfer, _take(queue, transfer, free_workers))]
        if transfer.light_bytes:
            self._join_light(queue, burst, share=-(-(len(queue) + 1) // self._limits[lane]))
        self._running[lane] += 1
        return burst

    @staticmethod
    def _join_light(queue: list[Entry], burst: Burst, *, share: int) -> None:
        """Adds the next light transfers of the same class: as many as leave each worker of the lane its share of the queue."""
        first, _ = burst[0]
        room_bytes = LIGHT_BURST_BYTES - first.light_bytes
        while len(burst) < share and (transfer := _first(queue)) is not None:
            if transfer.urgency is not first.urgency or not 0 < transfer.light_bytes <= room_bytes:
                return
            room_bytes -= transfer.light_bytes
            burst.append((transfer, _take(queue, transfer, 1)))

    def finish_burst(self, lane: Hashable, burst: Burst, outcomes: list[Outcome]) -> list[Transfer]:
        """A worker of `lane` returned; gives the transfers that are over and must be settled."""
        self._running[lane] -= 1
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
        """Per lane, for people; counts by looking."""
        return {
            lane: LaneStats(queued=sum(_is_in_force(entry) for entry in queue), running=self._running[lane])
            for lane, queue in self._queues.items()
        }


def _first(queue: list[Entry]) -> Transfer | None:
    """Whose turn it is in `queue`; stale entries before it are gone."""
    while queue and not _is_in_force(queue[0]):
        heappop(queue)
    return queue[0][3] if queue else None


def _take(queue: list[Entry], transfer: Transfer, free_workers: int) -> list[Piece]:
    """A burst's pieces of `transfer`, the first in `queue`."""
    pieces = transfer.take_burst(free_workers, is_last=len(queue) == 1)
    if not transfer.pieces:
        heappop(queue)  # a final piece is queued again when the others are done
    transfer.running += 1
    return pieces


def _is_in_force(entry: Entry) -> bool:
    """False if its transfer was raised since, or there is nothing left of it to start."""
    urgency, _, _, transfer = entry
    return urgency == transfer.urgency and transfer.has_piece
