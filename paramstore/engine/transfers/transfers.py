"""Carries out what the planner decided: starts its moves, raises their urgency, settles them, wakes those who waited.

The planner is reached through `deciding()` alone: what is decided in its block is carried out when the block ends, before the next
await. Each move ends in exactly one settle, whether its bytes arrived, failed their check, or were cancelled; extents are pinned
while a worker reads or writes them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from paramstore.core.key import ExpertKey
from paramstore.core.location import Located
from paramstore.engine.planner.planner import Planner
from paramstore.engine.tables.copies import ParamCopy, WorkingCopy
from paramstore.engine.tables.moves import Move, MoveKind
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.requests import PrefetchRequest, Urgency
from paramstore.engine.transfers.advance import Advancer
from paramstore.engine.transfers.arithmetic import materialise
from paramstore.engine.transfers.buffers import Buffers
from paramstore.engine.transfers.device_sums import DeviceSums
from paramstore.engine.transfers.hashing import Hashing
from paramstore.engine.transfers.log import TransferLog, bytes_of
from paramstore.engine.transfers.record_reads import RecordReads, read_transfer
from paramstore.engine.transfers.routes import ImageWrite, MasterRead, cut_for_write, cut_pieces
from paramstore.engine.transfers.runner import CPU_LANE, Runner, call, volume_lane, wake
from paramstore.engine.transfers.scheduler import Transfer
from paramstore.errors import ParamStoreError, TicketCancelled
from paramstore.storage.format.structures import Header
from paramstore.storage.volume.base import Volume


class _Deciding:
    """A block in which decisions are made: when it ends, they are carried out."""

    __slots__ = ("_planner", "_transfers")

    def __init__(self, transfers: Transfers, planner: Planner) -> None:
        self._transfers = transfers
        self._planner = planner

    def __enter__(self) -> Planner:
        return self._planner

    def __exit__(self, *_: object) -> None:
        self._transfers.carry_out()


class Transfers:
    """Starts and settles moves; knows the transfer under way of every copy. buffers: lent by the host tier."""

    def __init__(
        self, planner: Planner, runner: Runner, volumes: Mapping[int, Volume], buffers: Buffers, *, store_uuid: bytes,
        piece_bytes: int, hashing: Hashing, log: TransferLog, sums: DeviceSums | None = None,
    ) -> None:  # fmt: skip
        self._planner = planner
        self._deciding = _Deciding(self, planner)
        self.space = planner.space
        self.log = log
        self.runner = runner
        self.watch_writes: Callable[[], None] = lambda: None
        """Callback after every record that was written, for whoever counts bytes over the store's life."""
        self._volumes = volumes
        self._buffers = buffers
        self._store_uuid = store_uuid
        self._piece_bytes = piece_bytes
        self._hashing = hashing
        self.sums = sums or DeviceSums(is_kept=False)
        self._reads = RecordReads(volumes, store_uuid=store_uuid, piece_bytes=piece_bytes, hashing=hashing, sums=self.sums)
        self.traffic = self._reads.traffic
        self.advancer = Advancer(self._reads, runner, planner.space, buffers, log, settle=self._settle_made, drain=self.carry_out)
        self._under_way: dict[ParamCopy | WorkingCopy, tuple[Move, Transfer]] = {}
        """The move of every copy that is on its way, with its transfer; an update stands under both copies that it makes."""
        self._starts: dict[MoveKind, Callable[[Move], None]] = {
            MoveKind.LOAD_PARAM: self._start_load_param, MoveKind.MATERIALISE: self._start_materialise,
            MoveKind.ADVANCE: self.advancer.start, MoveKind.LOAD_WORKING: self._start_load,
            MoveKind.WRITE: self._start_write,
        }  # fmt: skip

    def deciding(self) -> _Deciding:
        """Gives the planner for the length of a `with` block, in which nothing is awaited; what it decided is carried out when the
        block ends, whether it raised or not."""
        return self._deciding

    def carry_out(self) -> None:
        """Carries out what was decided, and what follows from it: at the end of a block of `deciding()`, and where an extent may
        have come free."""
        self._planner.wake_for_space()
        while (decided := self._planner.take_decisions()) is not None:
            for move in decided.moves:
                self._starts[move.kind](move)
            for copy in decided.promoted:
                self.promote(copy, Urgency.DEMAND)
            for request in decided.finished:
                wake(request.future)
            for future in decided.woken:
                wake(future)

    @property
    def is_space_returning(self) -> bool:
        """Whether extents will come free by themselves: a worker still reads or writes what nobody needs."""
        return self._planner.is_space_returning

    def promote(self, copy: ParamCopy | WorkingCopy, urgency: Urgency) -> None:
        """Raises the transfer of `copy`, if one is under way."""
        if copy in self._under_way:
            self.runner.promote(self._under_way[copy][1], urgency)
        elif isinstance(copy, ParamCopy) and urgency is Urgency.DEMAND:
            self.advancer.promote(copy)

    def is_writing(self, working: WorkingCopy, volume: int) -> bool:
        """Whether a write of the record to `volume` is under way."""
        if working not in self._under_way:
            return False
        move, _ = self._under_way[working]
        return move.kind is MoveKind.WRITE and move.located is not None and move.located.extent.volume == volume

    # --- starting

    def _start_load_param(self, move: Move) -> None:
        schema = move.namespace.schema
        if not schema.is_trainable:
            self._start_load(move)
            return
        assert move.located is not None
        extent, staging = move.located.extent, self._buffers.of(move.namespace.name).staging
        read = MasterRead(self._volumes[extent.volume], extent, schema, self._slot_view(move), staging, self._hashing)
        pieces = cut_pieces(schema.stored, self._piece_bytes, len(schema.specs))
        self.space.pin(extent)
        settle = partial(self._settle_load_param, move)
        transfer = read_transfer(
            extent, read.run, pieces, schema.record_bytes, urgency=move.urgency, settle=settle, deadline_s=move.deadline_s
        )
        self._submit(move, transfer)

    def _start_load(self, move: Move) -> None:
        """Starts reading a whole record into a slot."""
        assert move.located is not None
        extent = move.located.extent
        self.space.pin(extent)
        settle = self._settle_load_param if isinstance(move.subject, ParamCopy) else self._settle_load_working
        transfer = self._reads.whole(
            move.namespace, move.subject.key, move.located, self._slot_view(move), urgency=move.urgency,
            deadline_s=move.deadline_s, settle=partial(settle, move),
        )  # fmt: skip
        self._submit(move, transfer)

    def _start_materialise(self, move: Move) -> None:
        assert move.source is not None
        assert move.source.slot is not None
        image = move.namespace.memory.working.view(move.source.slot)
        job = partial(materialise, move.namespace.schema, image, self._slot_view(move))
        self._submit(move, _compute(move, [job], partial(self._settle_materialise, move)))

    def _start_write(self, move: Move) -> None:
        working, located, namespace = move.subject, move.located, move.namespace
        assert isinstance(working, WorkingCopy)
        assert located is not None
        self.space.pin(located.extent)
        cut = namespace.steps.cut
        header = Header(
            store_uuid=self._store_uuid, namespace=namespace.name, key=working.key, identity=located.identity,
            sequence=cut.sequence if cut is not None and cut.awaits(working) else namespace.steps.sequence + 1,
            optimizer_step=working.optimizer_step, last_apply=working.last_apply, checksums=(),
        )  # fmt: skip
        part = namespace.schema.stored
        volume = self._volumes[located.extent.volume]
        first, *others = pieces = cut_for_write(part, self._piece_bytes)
        checksums = [0] * sum(len(piece.chunks) for piece in pieces)
        write = ImageWrite(volume, located.extent, part, self._slot_view(move), header, checksums, self._hashing)
        transfer = Transfer(
            lane=volume_lane(located.extent.volume), urgency=move.urgency, run=write.run, pieces=deque[Any](others), final=first,
            settle=partial(self._settle_write, move, write), light_bytes=0 if others else part.image_bytes,
        )  # fmt: skip
        self._submit(move, transfer)

    def _slot_view(self, move: Move) -> memoryview:
        namespace, subject = move.namespace, move.subject
        arena = namespace.memory.param if isinstance(subject, ParamCopy) else namespace.memory.working
        assert subject.slot is not None
        return arena.view(subject.slot)

    def _submit(self, move: Move, transfer: Transfer, *, also: Iterable[ParamCopy | WorkingCopy] = ()) -> None:
        for copy in (move.subject, *also):
            self._under_way[copy] = move, transfer
        self.log.watch(move, transfer, bytes_moved=bytes_of(move))
        self.runner.submit(transfer)

    def start_update(
        self, namespace: NamespaceState, copies: Sequence[WorkingCopy | ParamCopy], jobs: Sequence[Callable[[], object]], *,
        urgency: Urgency, settle: Callable[[ParamStoreError | None], None],
    ) -> Coroutine[Any, Any, None]:  # fmt: skip
        """Starts `jobs`, which together make new bytes in the slots of `copies`, the working copy first. settle: called with the
        error, if any, when they are done. The coroutine waits until that has happened and raises the error; cancelling it does not
        stop the jobs."""
        working = copies[0]
        move = Move(MoveKind.UPDATE, namespace, working, urgency)
        future = asyncio.get_running_loop().create_future()

        def settle_and_wake(transfer: Transfer) -> None:
            for copy in copies:
                del self._under_way[copy]
            settle(transfer.error)
            wake(future)

        transfer = _compute(move, jobs, settle_and_wake)
        self._submit(move, transfer, also=copies[1:])

        async def wait() -> None:
            await asyncio.shield(future)
            if transfer.error is not None:
                raise transfer.error

        return wait()

    # --- settling

    def _settle_load_param(self, move: Move, transfer: Transfer) -> None:
        _, error = self._verify_load(move, transfer)
        self._settle_made(move, error)

    def _settle_load_working(self, move: Move, transfer: Transfer) -> None:
        header, error = self._verify_load(move, transfer)
        step, last_apply = (header.optimizer_step, header.last_apply) if header is not None else (0, 0)
        working, namespace = move.subject, move.namespace
        assert isinstance(working, WorkingCopy)
        with self.deciding() as planner:
            planner.working.settle_load(namespace, working, optimizer_step=step, last_apply=last_apply, error=error)
            planner.after_working(namespace, working)

    def _verify_load(self, move: Move, transfer: Transfer) -> tuple[Header | None, ParamStoreError | None]:
        assert move.located is not None
        del self._under_way[move.subject]
        self.space.unpin(move.located.extent)
        return self._reads.verify(move.namespace, move.subject.key, move.located, transfer, read_bytes=bytes_of(move))

    def _settle_materialise(self, move: Move, transfer: Transfer) -> None:
        del self._under_way[move.subject]
        self._settle_made(move, transfer.error)

    def _settle_made(self, move: Move, error: ParamStoreError | None) -> None:
        assert isinstance(move.subject, ParamCopy)
        with self.deciding() as planner:
            planner.settle_made(move.namespace, move.subject, error, source=move.source)

    def _settle_write(self, move: Move, write: ImageWrite, transfer: Transfer) -> None:
        assert isinstance(move.subject, WorkingCopy)
        assert move.located is not None
        del self._under_way[move.subject]
        located = move.located._replace(root=write.root)
        self.space.unpin(located.extent)
        traffic = self.traffic[located.extent.volume]
        if transfer.error is None:
            traffic.bytes_written += located.extent.length_bytes
            traffic.writes += 1
            move.namespace.stats.bytes_written += located.extent.length_bytes
            self.watch_writes()
        else:
            traffic.failures += 1
        with self.deciding() as planner:
            planner.working.settle_write(move.namespace, move.subject, located, transfer.error)
            planner.after_working(move.namespace, move.subject)

    def count_note(self, namespace: NamespaceState, volume: int, note_bytes: int) -> None:
        """Counts a commit note that was written to `volume`. note_bytes: of all its copies."""
        traffic = self.traffic[volume]
        traffic.bytes_written += note_bytes
        traffic.note_bytes += note_bytes
        namespace.stats.note_bytes += note_bytes

    def fail_note(self, volume: int, error: ParamStoreError) -> None:
        """Counts a commit note that could not be written to `volume`, which may fence the volume."""
        self.traffic[volume].failures += 1
        self.space.fences.fail_write(volume, error)

    async def read_into(self, namespace: NamespaceState, key: ExpertKey, located: Located, target: memoryview) -> Header:
        """Fills `target` (record_bytes, page-aligned) with a whole, verified record, and returns its header. Raises VolumeError,
        CorruptRecord."""
        extent = located.extent
        future = asyncio.get_running_loop().create_future()
        transfer = self._reads.whole(
            namespace, key, located, target, urgency=Urgency.DEMAND, settle=lambda _: wake(future)
        )
        transfer.light_bytes = 0  # it goes alone: loads that others wait for shall not wait for it
        self.space.pin(extent)
        try:
            self.runner.submit(transfer)
            await asyncio.shield(future)
        finally:
            self.space.unpin(extent)
            with self.deciding() as planner:
                planner.go_on([namespace])  # somebody may wait for the extent
        if transfer.error is not None:
            raise transfer.error
        return self._reads.check(namespace, key, located, transfer.results)

    async def read_for_sums(self, namespace: NamespaceState, key: ExpertKey, located: Located) -> None:
        """Reads and verifies a record, whose extent the caller has pinned, through a small buffer: its device sums are known then.
        Raises VolumeError, CorruptRecord."""
        results = []
        for transfer in self._reads.pieces_for_sums(namespace, located):
            future = asyncio.get_running_loop().create_future()
            transfer.settle = lambda _, future=future: wake(future)  # type: ignore[misc]
            self.runner.submit(transfer)
            await asyncio.shield(future)
            if transfer.error is not None:
                raise transfer.error
            results += transfer.results
        self._reads.check(namespace, key, located, results)
        namespace.stats.records_read_for_sums += 1

    # --- cancelling

    def cancel_prefetch(self, request: PrefetchRequest) -> None:
        """Gives up the loads of `request` that have not started and that nobody else waits for. The others land all the same, and
        an update that makes what it waits for goes on."""
        error = TicketCancelled("the prefetch was cancelled")
        for subject in list(request.pending):
            others = subject.waiters if isinstance(subject, ParamCopy) else [*subject.prefetches, *subject.requests]
            if list(others) != [request]:
                continue
            if subject in self._under_way:
                move, transfer = self._under_way[subject]
                if move.kind is not MoveKind.UPDATE and transfer.urgency is not Urgency.DEMAND:
                    self.runner.cancel(transfer, error)
            elif isinstance(subject, ParamCopy):
                self.advancer.cancel(subject, error)
        with self.deciding() as planner:
            planner.requests.cancel(request, error)


def _compute(move: Move, jobs: Iterable[Callable[[], object]], settle: Callable[[Transfer], None]) -> Transfer:
    """Makes the transfer that runs `jobs` in the CPU's workers."""
    return Transfer(
        lane=CPU_LANE, urgency=move.urgency, run=call, pieces=deque[Any](jobs), settle=settle, deadline_s=move.deadline_s
    )
