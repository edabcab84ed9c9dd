"""A planner over one namespace without loop, clock, memory, volume or worker: what it decides is done at once, and counted.

Every record is committed at step 0. Time is the order of calls: nothing is under way between two of them, but what a caller
leaves undone by `start` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import count

from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.place import Identity, Located
from paramstore.core.schema import Schema
from paramstore.engine.admission import make_namespace
from paramstore.engine.arena import Arena
from paramstore.engine.gradients import GradientRange
from paramstore.engine.moves import Move, MoveKind
from paramstore.engine.namespace import NamespaceState, ParamCopy, View
from paramstore.engine.planner import Planner
from paramstore.engine.requests import LeaseRequest, PrefetchRequest, SlotRequest
from paramstore.policy.base import Policy
from paramstore.storage.catalog import NamespaceContents, NamespaceRow, Row, StepRow
from paramstore.storage.extents import Space
from paramstore.storage.ledger import Ledger

NAME = "sim"
MakePolicy = Callable[[int], Policy]
"""slots -> a policy."""


class NoMemory:
    """A segment that nobody may look into."""

    fd = None

    def __init__(self, length_bytes: int) -> None:
        self.length_bytes = length_bytes

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        raise AssertionError("a simulated planner moves no bytes")

    def touch(self) -> None:
        """Nothing."""

    def resident_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing."""


@dataclass(slots=True)
class Moved:
    """Moves that were done, by kind, and their bytes on the volume."""

    param_loads: int = 0
    materialised: int = 0
    working_loads: int = 0
    writes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class World:
    """Owner of a planner, its namespace and the count of what moved."""

    def __init__(
        self, schema: Schema, space: KeySpace, *, param_slots: int, working_slots: int, param_policy: MakePolicy,
        working_policy: MakePolicy,
    ) -> None:  # fmt: skip
        self.schema = schema
        self.moved = Moved()
        self._space = Space()
        self._space.add_volume(0, start_bytes=0, size_bytes=4 * (len(space) + 64) * schema.record_bytes, written_bytes=0)
        self.planner = Planner(self._space)
        self.namespace = self._committed(space)
        self.param_arena = _arena(schema.part("param").image_bytes, param_slots, param_policy(param_slots), segment=1)
        self.working_arena = self.param_arena
        if schema.is_trainable:
            self.working_arena = _arena(schema.record_bytes, working_slots, working_policy(working_slots), segment=2)
        self.namespace.param_arena, self.namespace.working_arena = self.param_arena, self.working_arena
        self._ids = count(1)

    def _committed(self, space: KeySpace) -> NamespaceState:
        row = NamespaceRow(NAME, self.schema.describe(), space.layers, space.experts, epoch=1, sequence=1)
        contents = NamespaceContents(row)
        for number, key in enumerate(space):
            extent = self._space.reserve(self.schema.record_bytes, owner=NAME)
            assert extent is not None
            contents.rows[key] = [Row(0, Located(extent, Identity(1, 0), number))]
        contents.steps[0] = StepRow(0, 1, 0, len(space), b"")
        return make_namespace(Ledger(contents))

    # --- calls

    def open(self, *, is_writer: bool) -> View:
        return self.planner.leases.open_view(self.namespace, is_writer=is_writer, step=None if is_writer else 0)

    def lease(self, view: View, keys: Sequence[ExpertKey]) -> None:
        """Acquires `keys`, whatever must move, and releases them."""
        request = LeaseRequest(view, next(self._ids), list(keys))
        self.planner.leases.request_lease(request)
        self.finish()
        assert request.is_finished
        assert request.error is None
        self.planner.leases.release(view, request.lease_id)
        self.finish()

    def prefetch(self, view: View, keys: Sequence[ExpertKey]) -> None:
        self.planner.leases.request_prefetch(PrefetchRequest(self.namespace, "param", None), view, list(keys))
        self.finish()

    def begin_apply(self, keys: Sequence[ExpertKey]) -> None:
        self.namespace.pending = {key: (GradientRange(NoMemory(1), 0, 1),) for key in keys}
        self.planner.begin_apply(self.namespace)
        self.planner.reserve_extents(self.namespace, keys)
        self.finish()

    def hold(self, key: ExpertKey, spared: Container[ExpertKey] = ()) -> SlotRequest:
        """Asks for the key's working copy; finished when it is in a slot and held. spared: what is not evicted for it."""
        request = SlotRequest(self.namespace, key, spared=spared)
        self.planner.working.request_slot(request)
        return request

    def update(self, request: SlotRequest) -> None:
        """Waits for the held copy and changes it, with its `param` copy where that finds a slot."""
        while not request.is_finished:
            assert self.finish(), f"{request.key} waits for a slot that nothing will free"
        working = self.namespace.working[request.key]
        copy = self.planner.plan_update(self.namespace, working)
        self.planner.settle_update(self.namespace, working, copy, None)
        self.finish()

    # --- moves

    def finish(self) -> bool:
        """Does everything that was decided, and what follows from it. False if nothing was."""
        outbox, did = self.planner.outbox, False
        while outbox.moves:
            moves, outbox.moves = outbox.moves, []
            for move in moves:
                did = True
                self._count(move)
                self._settle(move)
        outbox.promoted.clear()
        outbox.finished.clear()
        outbox.woken.clear()
        return did

    def _count(self, move: Move) -> None:
        moved, schema = self.moved, self.schema
        if move.kind is MoveKind.LOAD_PARAM:
            moved.param_loads += 1
            moved.bytes_read += _param_read_bytes(schema)
        elif move.kind is MoveKind.MATERIALISE:
            moved.materialised += 1
        elif move.kind is MoveKind.LOAD_WORKING:
            moved.working_loads += 1
            moved.bytes_read += schema.record_bytes
        elif move.kind is MoveKind.WRITE:
            moved.writes += 1
            moved.bytes_written += schema.record_bytes

    def _settle(self, move: Move) -> None:
        planner, namespace, subject = self.planner, self.namespace, move.subject
        if isinstance(subject, ParamCopy):
            if move.source is not None:
                planner.working.unhold(namespace, move.source)
            planner.copies.settle(namespace, subject, None)
            planner.leases.pump(namespace)
            return
        if move.kind is MoveKind.WRITE:
            assert move.located is not None
            planner.working.settle_write(namespace, subject, move.located, None)
        else:
            planner.working.settle_load(namespace, subject, optimizer_step=0, last_apply=0, error=None)
        planner.after_working(namespace, subject)


def _arena(slot_bytes: int, slots: int, policy: Policy, *, segment: int) -> Arena:
    arena = Arena(slot_bytes=slot_bytes, planned_slots=slots, policy=policy)
    arena.add_segment(segment, NoMemory(slots * slot_bytes), slots=slots)
    return arena


def _param_read_bytes(schema: Schema) -> int:
    """What a load of `param` reads of a record: the header and the masters it is made from, or all of it."""
    if not schema.is_trainable:
        return schema.record_bytes
    masters = sum(field.length_bytes for field in schema.stored.fields if field.name.startswith("master/"))
    return schema.stored.header_bytes + masters
