"""Records when transfers ran, for whoever asks "why did this step wait": one row for each that ends while somebody listens.

- While nobody listens no row is made, and a transfer costs one comparison.
- Times are of the store's clock (CLOCK_MONOTONIC in the daemon), which is the same in every process of the node.
- At most `ROWS_MAX` rows are kept; the oldest go first, and each listener is told how many of its rows went.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from paramstore.clock import Clock
from paramstore.engine.tables.moves import Move, MoveKind
from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.scheduler import Transfer

ROWS_MAX = 1 << 15
"""The most rows kept for all listeners together: 3 MB in one answer."""


class TransferRow(NamedTuple):
    """One transfer, which waited from submitted_s and was worked on from started_s to ended_s. bytes_moved: 0 if it failed."""

    kind: str
    namespace: str
    layer: int
    expert: int
    urgency: str
    bytes_moved: int
    submitted_s: float
    started_s: float
    ended_s: float


class TransferLog:
    """Keeps the rows and the listeners."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rows: deque[TransferRow] = deque(maxlen=ROWS_MAX)
        self._row_count = 0
        """Number of rows ever made, which is the number of the next one."""
        self._starts: dict[object, int] = {}
        """The listeners, each with the number of its first row."""

    def listen(self, listener: object) -> None:
        """Gives `listener` the rows that are made from now on; one who listens already starts anew."""
        self._starts[listener] = self._row_count

    def end(self, listener: object) -> dict[str, object]:
        """Ends listening; returns {transfers, dropped, now_s}: the listener's rows in the order in which the transfers ended, and
        how many were dropped. One who did not listen gets no rows."""
        start = self._starts.pop(listener, self._row_count)
        kept = min(self._row_count - start, len(self._rows))
        rows = list(self._rows)[len(self._rows) - kept :]
        if not self._starts:
            self._rows.clear()
        return {"transfers": rows, "dropped": self._row_count - start - kept, "now_s": self._clock.now_s()}

    def watch(self, move: Move, transfer: Transfer, *, bytes_moved: int) -> None:
        """Makes `transfer`, which carries out `move` and is not submitted yet, add a row when it ends, if somebody listens now."""
        if not self._starts:
            return
        started: list[float] = []  # workers append to it: the first one's is the least
        run, settle, submitted_s, now_s = transfer.run, transfer.settle, self._clock.now_s(), self._clock.now_s
        transfer.run = _timed(run, started, now_s)

        def settle_timed(ended: Transfer) -> None:
            self._add(move, ended, bytes_moved, submitted_s, min(started, default=now_s()))
            settle(ended)

        transfer.settle = settle_timed

    def _add(self, move: Move, transfer: Transfer, bytes_moved: int, submitted_s: float, started_s: float) -> None:
        if not self._starts:
            return  # whoever listened when it was submitted has ended
        key = move.subject.key
        self._row_count += 1
        self._rows.append(
            TransferRow(
                str(move.kind), move.namespace.name, *key, Urgency(transfer.urgency).name.lower(),
                0 if transfer.error is not None else bytes_moved, submitted_s, started_s, self._clock.now_s(),
            )
        )  # fmt: skip


def _timed(run: Callable[[Any], Any], started: list[float], now_s: Callable[[], float]) -> Callable[[Any], Any]:
    def timed(piece: Any) -> Any:
        started.append(now_s())
        return run(piece)

    return timed


def bytes_of(move: Move) -> int:
    """Bytes that `move` reads from a volume, writes to one, or makes in memory."""
    schema = move.namespace.schema
    if move.kind is MoveKind.LOAD_PARAM and schema.is_trainable:  # its masters alone
        return schema.stored.fields[len(schema.specs)].offset_bytes
    if move.kind is MoveKind.MATERIALISE:
        return schema.part("param").image_bytes
    return schema.record_bytes
