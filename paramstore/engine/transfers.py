"""Carries out what the planner decided: starts its moves, raises their urgency, settles them, wakes those who waited.

`drain` is called after every call of the planner and before the next await. Each move ends in exactly one settle, whether
its bytes arrived, failed their check, or were cancelled; extents are pinned while a worker reads or writes them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from paramstore.core.key import ExpertKey
from paramstore.core.place import Located
from paramstore.core.schema import Part
from paramstore.engine.advance import Advancer
from paramstore.engine.arithmetic import materialise
from paramstore.engine.hashing import Hashing
from paramstore.engine.moves import Move, MoveKind
from paramstore.engine.namespace import NamespaceState, ParamCopy, WorkingCopy
from paramstore.engine.planner import Planner
from paramstore.engine.requests import PrefetchRequest, Urgency
from paramstore.engine.routes import ImageRead, ImageWrite, MasterRead, Piece, PieceRead, check_pieces, cut_for_write, cut_pieces
from paramstore.engine.runner import CPU_LANE, Runner, call, volume_lane, wake
from paramstore.engine.scheduler import Transfer
from paramstore.engine.transfer_log import TransferLog, bytes_of
from paramstore.errors import ParamStoreError, TicketCancelled
from paramstore.storage.format import Header, check_header
from paramstore.storage.volume import Volume


@dataclass(slots=True)
class VolumeTraffic:
    """Bytes moved since start, per volume. bytes_written: records and notes, without zero-fill and without what failed."""

    bytes_read: int = 0
    bytes_written: int = 0
    note_bytes: int = 0
    reads: int = 0
    writes: int = 0
    failures: int = 0


class Transfers:
    """Starts and settles moves; owner of the traffic counters."""

    def __init__(
        self, planner: Planner, runner: Runner, volumes: Mapping[int, Volume], *, store_uuid: bytes, piece_bytes: int,
        hashing: Hashing, log: TransferLog,
    ) -> None:  # fmt: skip
        self.planner = planner
        self.log = log
        self.runner = runner
        self.traffic = {index: VolumeTraffic() for index in volumes}
        self.watch_writes: Callable[[], None] = lambda: None
        """Callback after every record that was written, for whoever counts bytes over the store's life."""
        self.volumes = volumes
        self._store_uuid = store_uuid
        self._piece_bytes = piece_bytes
        self.hashing = hashing
        self._advancer = Advancer(self)

    def drain(self) -> None:
        """Carries out everything in the planner's outbox."""
        outbox = self.planner.outbox
        self.planner.wake_for_space()
        while not outbox.is_empty:
            moves, outbox.moves = outbox.moves, []
            promoted, outbox.promoted = outbox.promoted, []
            finished, outbox.finished = outbox.finished, []
            woken, outbox.woken = outbox.woken, []
            for move in moves:
                self._start(move)
            for move in promoted:
                if move.kind is MoveKind.ADVANCE:
                    self._advancer.promote(move)
                if move.transfer is not None:
                    self.runner.promote(move.transfer, Urgency.DEMAND)
            for request in finished:
                wake(request.future)
            for future in woken:
                wake(future)

    def pump(self, namespaces: Iterable[NamespaceState]) -> None:
        """Lets requests that wait for slots in any of these go on: their writes may have found no space, and some came free."""
        for namespace in namespaces:
            self.planner.leases.pump(namespace)
        self.drain()

    # --- starting

    def _start(self, move: Move) -> None:
        if move.kind is MoveKind.MATERIALISE:
            self._start_materialise(move)
        elif move.kind is MoveKind.WRITE:
            self._start_write(move)
        elif move.kind is MoveKind.ADVANCE:
            self._advancer.start(move)
        else:
            self._start_read(move)

    def _start_read(self, move: Move) -> None:
        assert move.located is not None
        schema, extent = move.namespace.schema, move.located.extent
        slot = self._slot_view(move)
        volume = self.volumes[extent.volume]
        self.planner.space.pin(extent)
        read: ImageRead | MasterRead
        if move.kind is MoveKind.LOAD_PARAM and schema.is_trainable:
            assert move.namespace.staging is not None
            read = MasterRead(volume, extent, schema, slot, move.namespace.staging, self.hashing)
            pieces = cut_pieces(schema.stored, self._piece_bytes, len(schema.specs))
        else:
            read = ImageRead(volume, extent, slot, schema.stored.header_bytes, self.hashing)
            pieces = self.pieces_of(schema.stored)
        light_bytes = schema.record_bytes if len(pieces) == 1 else 0
        self._submit(move, volume_lane(extent.volume), read.run, deque(pieces), self._settle_read, light_bytes=light_bytes)

    def _start_materialise(self, move: Move) -> None:
        assert move.source is not None
        assert move.source.slot is not None
        assert move.namespace.working_arena is not None
        image = move.namespace.working_arena.view(move.source.slot)
        job = partial(materialise, move.namespace.schema, image, self._slot_view(move))
        self._submit(move, CPU_LANE, call, deque([job]), self._settle_materialise)

    def _start_write(self, move: Move) -> None:
        working, located, namespace = move.subject, move.located, move.namespace
        assert isinstance(working, WorkingCopy)
        assert located is not None
        self.planner.space.pin(located.extent)
        cut = namespace.cut
        header = Header(
            store_uuid=self._store_uuid, namespace=namespace.name, key=working.key, identity=located.identity,
            sequence=cut.sequence if cut is not None and working.is_cut else namespace.sequence + 1,
            optimizer_step=working.optimizer_step, last_apply=working.last_apply, checksums=(),
        )  # fmt: skip
        part = namespace.schema.stored
        volume = self.volumes[located.extent.volume]
        first, *others = pieces = cut_for_write(part, self._piece_bytes)
        checksums = [0] * sum(len(piece.chunks) for piece in pieces)
        write = ImageWrite(volume, located.extent, part, self._slot_view(move), header, checksums, self.hashing)
        lane = volume_lane(located.extent.volume)
        settle = partial(self._settle_write, write=write)
        light_bytes = 0 if others else part.image_bytes
        self._submit(move, lane, write.run, deque(others), settle, final=first, light_bytes=light_bytes)

    def _slot_view(self, move: Move) -> memoryview:
        namespace, subject = move.namespace, move.subject
        arena = namespace.param_arena if isinstance(subject, ParamCopy) else namespace.working_arena
        assert arena is not None
        assert subject.slot is not None
        return arena.view(subject.slot)

    def _submit(
        self, move: Move, lane: Hashable, run: Callable[..., object], pieces: deque[Any],
        settle: Callable[[Move, Transfer], None], final: object = None, light_bytes: int = 0,
    ) -> None:  # fmt: skip
        move.transfer = Transfer(
            lane=lane, urgency=move.urgency, run=run, pieces=pieces, final=final, deadline_s=move.deadline_s,
            settle=partial(settle, move), light_bytes=light_bytes,
        )  # fmt: skip
        self.log.watch(move, move.transfer, bytes_moved=bytes_of(move))
        self.runner.submit(move.transfer)

    # --- settling

    def _settle_read(self, move: Move, transfer: Transfer) -> None:
        located, namespace, subject = move.located, move.namespace, move.subject
        assert located is not None
        self.planner.space.unpin(located.extent)
        header, error = self.verify_read(move, located, transfer)
        if isinstance(subject, ParamCopy):
            self.planner.copies.settle(namespace, subject, error)
            self.planner.leases.pump(namespace)
        else:
            step, last_apply = (header.optimizer_step, header.last_apply) if header is not None else (0, 0)
            self.planner.working.settle_load(namespace, subject, optimizer_step=step, last_apply=last_apply, error=error)
            self.planner.after_working(namespace, subject)
        self.drain()

    def verify_read(self, move: Move, located: Located, transfer: Transfer) -> tuple[Header | None, ParamStoreError | None]:
        """Checks a record that was read; returns its header, or the error that the read ended with. Counts the read either way."""
        header, error = None, transfer.error
        if error is None:
            try:
                header = self._verify_record(move.namespace, move.subject.key, located, transfer.results)
            except ParamStoreError as caught:
                error = caught
        self._count_read(move, located, transfer, error)
        return header, error

    def pieces_of(self, part: Part) -> tuple[Piece, ...]:
        """The pieces in which a whole record is read."""
        return cut_pieces(part, self._piece_bytes, len(part.fields))

    def _verify_record(
        self, namespace: NamespaceState, key: ExpertKey, located: Located, results: list[PieceRead]
    ) -> Header:
        part, extent = namespace.schema.stored, located.extent
        place = f"volume {extent.volume}, offset {extent.offset_bytes}"
        head = next(result.header for result in results if result.header is not None)
        header = check_header(
            head, part=part, root=located.root, store_uuid=self._store_uuid, namespace=namespace.name,
            key=key, identity=located.identity, place=place,
        )  # fmt: skip
        check_pieces(header, part, results, place=place)
        return header

    def _count_read(self, move: Move, located: Located, transfer: Transfer, error: ParamStoreError | None) -> None:
        traffic = self.traffic[located.extent.volume]
        if error is not None and not isinstance(error, TicketCancelled):
            traffic.failures += 1
        moved = bytes_of(move)
        if transfer.error is None:
            traffic.bytes_read += moved
            traffic.reads += 1
            move.namespace.stats.bytes_read += moved

    def _settle_materialise(self, move: Move, transfer: Transfer) -> None:
        assert isinstance(move.subject, ParamCopy)
        assert move.source is not None
        self.planner.working.unhold(move.namespace, move.source)
        self.planner.copies.settle(move.namespace, move.subject, transfer.error)
        self.planner.leases.pump(move.namespace)
        self.drain()

    def _settle_write(self, move: Move, transfer: Transfer, *, write: ImageWrite) -> None:
        assert isinstance(move.subject, WorkingCopy)
        assert move.located is not None
        located = move.located._replace(root=write.root)
        self.planner.space.unpin(located.extent)
        traffic = self.traffic[located.extent.volume]
        if transfer.error is None:
            traffic.bytes_written += located.extent.length_bytes
            traffic.writes += 1
            move.namespace.stats.bytes_written += located.extent.length_bytes
            self.watch_writes()
        else:
            traffic.failures += 1
        self.planner.working.settle_write(move.namespace, move.subject, located, transfer.error)
        self.planner.after_working(move.namespace, move.subject)
        self.drain()

    def count_note(self, namespace: NamespaceState, volume: int, note_bytes: int) -> None:
        """Counts a commit note that was written to `volume`. note_bytes: of all its copies."""
        traffic = self.traffic[volume]
        traffic.bytes_written += note_bytes
        traffic.note_bytes += note_bytes
        namespace.stats.note_bytes += note_bytes

    def fail_note(self, volume: int, error: ParamStoreError) -> None:
        """Counts a commit note that could not be written to `volume`, which may fence the volume."""
        self.traffic[volume].failures += 1
        self.planner.space.fences.fail_write(volume, error)

    async def read_into(self, namespace: NamespaceState, key: ExpertKey, located: Located, target: memoryview) -> Header:
        """Fills `target` (record_bytes, page-aligned) with a whole, verified record, and returns its header. Raises VolumeError,
        CorruptRecord."""
        part, extent = namespace.schema.stored, located.extent
        read = ImageRead(self.volumes[extent.volume], extent, target, part.header_bytes, self.hashing)
        future = asyncio.get_running_loop().create_future()
        pieces: deque[Any] = deque(self.pieces_of(part))
        transfer = Transfer(
            lane=volume_lane(extent.volume), urgency=Urgency.DEMAND, run=read.run, pieces=pieces, settle=lambda _: wake(future)
        )
        self.planner.space.pin(extent)
        try:
            self.runner.submit(transfer)
            await asyncio.shield(future)
        finally:
            self.planner.space.unpin(extent)
            self.pump([namespace])  # somebody may wait for the extent
        if transfer.error is not None:
            raise transfer.error
        return self._verify_record(namespace, key, located, transfer.results)

    # --- cancelling

    def cancel_prefetch(self, request: PrefetchRequest) -> None:
        """Gives up the loads of `request` that have not started and that nobody else waits for; the others land all the same."""
        error = TicketCancelled("the prefetch was cancelled")
        for subject in list(request.pending):
            others = subject.waiters if isinstance(subject, ParamCopy) else [*subject.prefetches, *subject.requests]
            move = subject.move
            if move is None or list(others) != [request]:
                continue
            if move.transfer is not None and move.transfer.urgency is not Urgency.DEMAND:
                self.runner.cancel(move.transfer, error)
            elif move.kind is MoveKind.ADVANCE and move.urgency is not Urgency.DEMAND:
                self._advancer.give_up(move, error)
        if not request.is_finished:
            request.error = request.error or error
            request.is_finished = True
            wake(request.future)
        self.drain()
