"""The advancer: makes the missed steps of a record on a private copy, and `param` from that copy; the record stays as it is.

The copy lies in a buffer of the namespace: read from the record's extent, or copied from its working slot, which is held meanwhile.
Buffers are few and go to the most urgent move first. A move that waits for one keeps its extent pinned, or its slot held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import Options
from paramstore.core.schema import Schema
from paramstore.engine.tables.copies import ParamCopy
from paramstore.engine.tables.moves import Move
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.arithmetic import update
from paramstore.engine.transfers.buffers import Buffers
from paramstore.engine.transfers.log import TransferLog
from paramstore.engine.transfers.record_reads import RecordReads
from paramstore.engine.transfers.runner import CPU_LANE, Runner, call
from paramstore.engine.transfers.scheduler import Transfer
from paramstore.errors import ParamStoreError
from paramstore.storage.space.extents import Space

ADVANCE_LOOKAHEAD_RECORDS = 2
"""Buffers of a namespace beside one for each worker that makes steps: records are read into these meanwhile."""


@dataclass(slots=True, eq=False)
class Advance:
    """An ADVANCE move under way. urgency: the move's, or what it was raised to. transfer: the one that runs for it, once it has a
    buffer: first the read, then the steps."""

    move: Move
    urgency: Urgency
    transfer: Transfer | None = None

    @property
    def copy(self) -> ParamCopy:
        assert isinstance(self.move.subject, ParamCopy)
        return self.move.subject


class Advances:
    """The advances of one namespace: those that have a buffer, and those that wait for one."""

    def __init__(self) -> None:
        self.waiting: dict[Advance, int] = {}
        """Advances that wait for a buffer, each with its number in order of arrival; at most one a slot of the `param` arena."""
        self.running: dict[ParamCopy, Advance] = {}
        self._queue: list[tuple[Urgency, float, int, Advance]] = []
        """Heap of those that wait, the most urgent first. One that became more urgent is in it twice; entries of those that wait no
        more are skipped."""
        self._numbers = count()

    def add(self, advance: Advance) -> None:
        self.waiting[advance] = next(self._numbers)
        self._push(advance)

    def raise_urgency(self, advance: Advance) -> None:
        """Raises the advance to DEMAND, in the queue too if it waits there."""
        advance.urgency = Urgency.DEMAND
        if advance in self.waiting:
            self._push(advance)

    def _push(self, advance: Advance) -> None:
        deadline_s = float("inf") if advance.move.deadline_s is None else advance.move.deadline_s
        heappush(self._queue, (advance.urgency, deadline_s, self.waiting[advance], advance))

    def head(self) -> Advance | None:
        """The most urgent advance that waits, the first that came among equals; None if none waits."""
        while self._queue and self._queue[0][3] not in self.waiting:
            heappop(self._queue)
        return self._queue[0][3] if self._queue else None


class Advancer:
    """Carries out moves of kind ADVANCE, on the event-loop thread. settle: called once for each move, with the error that ended it,
    if any. drain: carries out what was decided."""

    def __init__(
        self, reads: RecordReads, runner: Runner, space: Space, buffers: Buffers, log: TransferLog, *,
        settle: Callable[[Move, ParamStoreError | None], None], drain: Callable[[], None],
    ) -> None:  # fmt: skip
        self._reads = reads
        self._runner = runner
        self._space = space
        self._buffers = buffers
        self._log = log
        self._settle = settle
        self._drain = drain
        self._under_way: dict[ParamCopy, Advance] = {}
        self._advances: dict[str, Advances] = {}
        """By the name of the namespace."""

    def of(self, namespace: str) -> Advances:
        """The advances of a namespace."""
        return self._advances.setdefault(namespace, Advances())

    def start(self, move: Move) -> None:
        """Starts the move, or queues it for a buffer."""
        if move.located is not None:
            self._space.pin(move.located.extent)
        advance = Advance(move, move.urgency)
        self._under_way[advance.copy] = advance
        self.of(move.namespace.name).add(advance)
        self._give_buffers(move.namespace)

    def promote(self, copy: ParamCopy) -> None:
        """Raises the move that makes `copy`, if it is one of ours, to DEMAND, because somebody waits for it now."""
        advance = self._under_way.get(copy)
        if advance is None:
            return
        namespace = advance.move.namespace
        self.of(namespace.name).raise_urgency(advance)
        self._hurry(namespace)
        if advance.transfer is not None:
            self._runner.promote(advance.transfer, Urgency.DEMAND)

    def cancel(self, copy: ParamCopy, error: ParamStoreError) -> None:
        """Ends the move that makes `copy`, if it is one of ours, with `error`. It goes on where it is urgent, or a worker has begun
        it."""
        advance = self._under_way.get(copy)
        if advance is None:
            return
        if advance.transfer is not None:
            if advance.transfer.urgency is not Urgency.DEMAND:
                self._runner.cancel(advance.transfer, error)
        elif advance.urgency is not Urgency.DEMAND:
            advances = self.of(advance.move.namespace.name)
            del advances.waiting[advance]
            if advance.move.located is not None:
                self._space.unpin(advance.move.located.extent)
            self._end(advance, error)

    def _give_buffers(self, namespace: NamespaceState) -> None:
        advances, free = self.of(namespace.name), self._buffers.of(namespace.name).advance
        while free and (advance := advances.head()) is not None:
            del advances.waiting[advance]
            advances.running[advance.copy] = advance
            buffer = free.popleft()
            if advance.move.located is not None:
                self._read(advance, buffer)
            else:
                assert advance.move.source is not None
                self._advance(advance, buffer, optimizer_step=advance.move.source.optimizer_step)
        self._hurry(namespace)

    def _hurry(self, namespace: NamespaceState) -> None:
        """Raises advances that have a buffer to DEMAND while one of that class waits for one."""
        advances = self.of(namespace.name)
        head = advances.head()
        if head is not None and head.urgency is Urgency.DEMAND:
            for advance in advances.running.values():
                if advance.transfer is not None:
                    self._runner.promote(advance.transfer, Urgency.DEMAND)

    def _read(self, advance: Advance, buffer: memoryview) -> None:
        move = advance.move
        assert move.located is not None
        transfer = self._reads.whole(
            move.namespace, advance.copy.key, move.located, buffer, urgency=advance.urgency, deadline_s=move.deadline_s,
            settle=partial(self._settle_read, advance, buffer),
        )  # fmt: skip
        self._submit(advance, transfer, bytes_moved=move.namespace.schema.record_bytes)

    def _submit(self, advance: Advance, transfer: Transfer, *, bytes_moved: int) -> None:
        advance.transfer = transfer
        self._log.watch(advance.move, transfer, bytes_moved=bytes_moved)
        self._runner.submit(transfer)

    def _settle_read(self, advance: Advance, buffer: memoryview, transfer: Transfer) -> None:
        move = advance.move
        assert move.located is not None
        self._space.unpin(move.located.extent)
        read_bytes = move.namespace.schema.record_bytes
        header, error = self._reads.verify(move.namespace, advance.copy.key, move.located, transfer, read_bytes=read_bytes)
        if header is None:
            self._finish(advance, buffer, error)
        else:
            advance.urgency = min(advance.urgency, transfer.urgency)
            self._advance(advance, buffer, optimizer_step=header.optimizer_step)
        self._drain()

    def _advance(self, running: Advance, buffer: memoryview, *, optimizer_step: int) -> None:
        move, copy, namespace = running.move, running.copy, running.move.namespace
        image = None
        if move.source is not None:
            assert move.source.slot is not None
            image = namespace.memory.working.view(move.source.slot)
        param = namespace.memory.param.view(copy.slot)
        job = partial(
            advance, namespace.schema, buffer, key=copy.key, missed=copy.missed, optimizer_step=optimizer_step, source=image,
            param=param,
        )  # fmt: skip
        transfer = Transfer(
            lane=CPU_LANE, urgency=running.urgency, run=call, pieces=deque[Callable[[], object]]([job]), deadline_s=move.deadline_s,
            settle=partial(self._settle_advance, running, buffer),
        )  # fmt: skip
        self._submit(running, transfer, bytes_moved=namespace.schema.part("param").image_bytes)

    def _settle_advance(self, advance: Advance, buffer: memoryview, transfer: Transfer) -> None:
        if transfer.error is None:
            count_advance(advance.move.namespace, len(advance.copy.missed))
        self._finish(advance, buffer, transfer.error)

    def _finish(self, advance: Advance, buffer: memoryview, error: ParamStoreError | None) -> None:
        namespace = advance.move.namespace
        del self.of(namespace.name).running[advance.copy]
        self._buffers.of(namespace.name).advance.append(buffer)
        self._give_buffers(namespace)
        self._end(advance, error)

    def _end(self, advance: Advance, error: ParamStoreError | None) -> None:
        del self._under_way[advance.copy]
        self._settle(advance.move, error)


def advance(
    schema: Schema, buffer: memoryview, *, key: ExpertKey, missed: Sequence[Options], optimizer_step: int,
    source: memoryview | None = None, param: memoryview | None = None,
) -> None:  # fmt: skip
    """Makes the steps `missed` on `buffer`, the image of `key`'s record, and then `param` from it, where given. Runs in a worker.

    optimizer_step: torch's `step` of the record before them. source: the record's image, copied into `buffer` first; None: it is
    there already. The header stays as it is.
    """
    if source is not None:
        buffer[:] = source
    update(
        schema, buffer, [], options=None, optimizer_step=optimizer_step + len(missed), grad_scale=1.0, param=param, missed=missed,
        key=key,
    )  # fmt: skip


def count_advance(namespace: NamespaceState, steps: int) -> None:
    """Counts one record that was advanced by `steps` missed steps."""
    namespace.stats.records_advanced += 1
    namespace.stats.missed_steps_made += steps
