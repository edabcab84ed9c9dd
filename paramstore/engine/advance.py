"""The advancer: makes the missed steps of a record on a private copy, and `param` from that copy; the record stays as it is.

The copy lies in a buffer of the namespace: read from the record's extent, or copied from its working slot, which is held meanwhile.
Buffers are few and go to the most urgent move first. A move that waits for one keeps its extent pinned, or its slot held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import Options
from paramstore.core.schema import Schema
from paramstore.engine.arithmetic import update
from paramstore.engine.moves import Move
from paramstore.engine.namespace import NamespaceState, ParamCopy
from paramstore.engine.requests import Urgency
from paramstore.engine.routes import ImageRead
from paramstore.engine.runner import CPU_LANE, call, volume_lane
from paramstore.engine.scheduler import Transfer
from paramstore.errors import ParamStoreError

if TYPE_CHECKING:
    from paramstore.engine.transfers import Transfers


ADVANCE_LOOKAHEAD_RECORDS = 2
"""Buffers of a namespace beside one for each worker that makes steps: records are read into these meanwhile."""


class Advances:
    """The advances of one namespace: free buffers of a record each, and the moves that have one or wait for one."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.free = deque(buffers)
        self.waiting: dict[Move, int] = {}
        """Moves that wait for a buffer, each with its number in order of arrival; at most one a slot of the `param` arena."""
        self.running: list[Move] = []
        self._queue: list[tuple[Urgency, float, int, Move]] = []
        """Heap of the moves that wait, the most urgent first. A move that became more urgent is in it twice; entries of moves that
        wait no more are skipped."""
        self._numbers = count()

    def add(self, move: Move) -> None:
        self.waiting[move] = next(self._numbers)
        self._push(move)

    def raise_urgency(self, move: Move) -> None:
        """Queues `move` by its new, higher urgency; does nothing if it does not wait."""
        if move in self.waiting:
            self._push(move)

    def _push(self, move: Move) -> None:
        deadline_s = float("inf") if move.deadline_s is None else move.deadline_s
        heappush(self._queue, (move.urgency, deadline_s, self.waiting[move], move))

    def head(self) -> Move | None:
        """The most urgent move that waits, the first that came among equals; None if none waits."""
        while self._queue and self._queue[0][3] not in self.waiting:
            heappop(self._queue)
        return self._queue[0][3] if self._queue else None


class Advancer:
    """Carries out moves of kind ADVANCE; part of `Transfers`, on the event-loop thread."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def start(self, move: Move) -> None:
        """Starts the move, or queues it for a buffer. It ends in one settle of its copy, as every move does."""
        if move.located is not None:
            self._transfers.planner.space.pin(move.located.extent)
        _advances(move.namespace).add(move)
        self._give_buffers(move.namespace)

    def promote(self, move: Move) -> None:
        """Raises the move to DEMAND, because somebody waits for it now."""
        move.urgency = Urgency.DEMAND
        _advances(move.namespace).raise_urgency(move)
        self._hurry(move.namespace)

    def give_up(self, move: Move, error: ParamStoreError) -> None:
        """Ends the move with `error` if it still waits for a buffer; else does nothing."""
        if _advances(move.namespace).waiting.pop(move, None) is None:
            return
        if move.located is not None:
            self._transfers.planner.space.unpin(move.located.extent)
        self._settle(move, error)

    def _give_buffers(self, namespace: NamespaceState) -> None:
        advances = _advances(namespace)
        while advances.free and (move := advances.head()) is not None:
            del advances.waiting[move]
            advances.running.append(move)
            buffer = advances.free.popleft()
            if move.located is not None:
                self._read(move, buffer)
            else:
                assert move.source is not None
                self._advance(move, buffer, optimizer_step=move.source.optimizer_step)
        self._hurry(namespace)

    def _hurry(self, namespace: NamespaceState) -> None:
        """Raises moves that have a buffer to DEMAND while a move of that class waits for one."""
        advances = _advances(namespace)
        head = advances.head()
        if head is not None and head.urgency is Urgency.DEMAND:
            for move in advances.running:
                if move.transfer is not None:
                    self._transfers.runner.promote(move.transfer, Urgency.DEMAND)

    def _read(self, move: Move, buffer: memoryview) -> None:
        assert move.located is not None
        extent, part = move.located.extent, move.namespace.schema.stored
        read = ImageRead(self._transfers.volumes[extent.volume], extent, buffer, part.header_bytes, self._transfers.hashing)
        pieces = self._transfers.pieces_of(part)
        move.transfer = Transfer(
            lane=volume_lane(extent.volume), urgency=move.urgency, run=read.run, pieces=deque(pieces), deadline_s=move.deadline_s,
            settle=partial(self._settle_read, move, buffer), light_bytes=part.image_bytes if len(pieces) == 1 else 0,
        )  # fmt: skip
        self._transfers.log.watch(move, move.transfer, bytes_moved=part.image_bytes)
        self._transfers.runner.submit(move.transfer)

    def _settle_read(self, move: Move, buffer: memoryview, transfer: Transfer) -> None:
        assert move.located is not None
        self._transfers.planner.space.unpin(move.located.extent)
        header, error = self._transfers.verify_read(move, move.located, transfer)
        if header is None:
            self._finish(move, buffer, error)
        else:
            move.urgency = min(move.urgency, transfer.urgency)
            self._advance(move, buffer, optimizer_step=header.optimizer_step)
        self._transfers.drain()

    def _advance(self, move: Move, buffer: memoryview, *, optimizer_step: int) -> None:
        copy, namespace = move.subject, move.namespace
        assert isinstance(copy, ParamCopy)
        assert namespace.param_arena is not None
        image = None
        if move.source is not None:
            assert move.source.slot is not None
            assert namespace.working_arena is not None
            image = namespace.working_arena.view(move.source.slot)
        param = namespace.param_arena.view(copy.slot)
        job = partial(
            advance, namespace.schema, buffer, key=copy.key, missed=copy.missed, optimizer_step=optimizer_step, source=image,
            param=param,
        )  # fmt: skip
        move.transfer = Transfer(
            lane=CPU_LANE, urgency=move.urgency, run=call, pieces=deque[Callable[[], object]]([job]), deadline_s=move.deadline_s,
            settle=partial(self._settle_advance, move, buffer),
        )  # fmt: skip
        self._transfers.log.watch(move, move.transfer, bytes_moved=namespace.schema.part("param").image_bytes)
        self._transfers.runner.submit(move.transfer)

    def _settle_advance(self, move: Move, buffer: memoryview, transfer: Transfer) -> None:
        copy = move.subject
        assert isinstance(copy, ParamCopy)
        if transfer.error is None:
            count_advance(move.namespace, len(copy.missed))
        self._finish(move, buffer, transfer.error)
        self._transfers.drain()

    def _finish(self, move: Move, buffer: memoryview, error: ParamStoreError | None) -> None:
        advances = _advances(move.namespace)
        advances.running.remove(move)
        advances.free.append(buffer)
        self._settle(move, error)
        self._give_buffers(move.namespace)

    def _settle(self, move: Move, error: ParamStoreError | None) -> None:
        copy, namespace, planner = move.subject, move.namespace, self._transfers.planner
        assert isinstance(copy, ParamCopy)
        if move.source is not None:
            planner.working.unhold(namespace, move.source)
        planner.copies.settle(namespace, copy, error)
        planner.leases.pump(namespace)


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


def _advances(namespace: NamespaceState) -> Advances:
    assert namespace.advances is not None
    return namespace.advances
