"""A planner over one namespace without loop, clock, memory, volume or worker.

`PlannerAlone` is that planner; its user carries out what it decides. A `World` carries it out at once, and counts: time is the
order of calls, and nothing is under way between two of them, but what a caller that uses `hold` alone leaves undone.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import count

from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.location import Identity, Located
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore.engine.planner.planner import Planner, fresh_namespace
from paramstore.engine.planner.promises import Opening, share_of
from paramstore.engine.tables.apply import Claims, GradientRange
from paramstore.engine.tables.arena import Arena, Arenas
from paramstore.engine.tables.copies import ParamCopy
from paramstore.engine.tables.moves import Move, MoveKind
from paramstore.engine.tables.namespace import LeaseRequest, NamespaceState, View, WriterGroup
from paramstore.engine.tables.requests import SlotRequest
from paramstore.errors import ParamStoreError
from paramstore.policy.base import Policy
from paramstore.storage.catalog.base import NamespaceContents, NamespaceRow, Row, StepRow
from paramstore.storage.catalog.ledger import Ledger
from paramstore.storage.space.extents import Space

NAME = "moe"
FIRST = Identity(1, 0)
MakePolicy = Callable[[int], Policy]
"""Function that makes a policy for a number of slots."""


class NoMemory:
    """A segment without memory, which nobody may look into."""

    fd = None

    def __init__(self, length_bytes: int) -> None:
        self.length_bytes = length_bytes

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        raise AssertionError("a simulated planner moves no bytes")

    def touch(self) -> None:
        """Does nothing: there is no memory."""

    def resident_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Does nothing: there is no memory."""


@dataclass(slots=True)
class Moved:
    """Moves that were done, by kind, and their bytes on the volume."""

    param_loads: int = 0
    materialised: int = 0
    working_loads: int = 0
    writes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class PlannerAlone:
    """Owner of a planner and its namespace. Sizes are in slots and extents."""

    def __init__(
        self, schema: Schema, keys: KeySpace, *, param_slots: int, working_slots: int, param_policy: MakePolicy,
        working_policy: MakePolicy, extents: int, is_committed: bool = True, reader_slots: int | None = 0,
    ) -> None:  # fmt: skip
        """is_committed: every record is committed, at step 0 with version 0 of epoch 1; else the namespace is empty."""
        self.schema = schema
        self.space = Space()
        self.space.add_volume(0, start_bytes=0, size_bytes=extents * schema.record_bytes, written_bytes=0)
        self.planner = Planner(self.space, reader_slots=reader_slots)
        self.namespace = self._made(keys, is_committed=is_committed)
        self.param_arena = _arena(schema.part("param").image_bytes, param_slots, param_policy(param_slots), segment=1)
        self.working_arena = self.param_arena
        if schema.is_trainable:
            self.working_arena = _arena(schema.record_bytes, working_slots, working_policy(working_slots), segment=2)
        self.namespace.open_memory(Arenas(self.param_arena, self.working_arena))
        self.ids = count(1)

    def _made(self, keys: KeySpace, *, is_committed: bool) -> NamespaceState:
        row = NamespaceRow(NAME, self.schema.describe(), keys.layers, keys.experts, epoch=1, sequence=1)
        contents = NamespaceContents(row)
        for number, key in enumerate(keys if is_committed else ()):
            extent = self.space.reserve(self.schema.record_bytes, owner=NAME)
            assert extent is not None
            contents.rows[key] = [Row(0, Located(extent, FIRST, number))]
            contents.steps[0] = StepRow(0, 1, 0, len(keys), b"")
        return fresh_namespace(Ledger(contents))

    def settle(
        self, move: Move, error: ParamStoreError | None = None, *, root: int = 0, optimizer_step: int = 0, last_apply: int = 0
    ) -> None:
        """Settles a move as `engine.transfers` would. root: the root of what was written. The others: what a loaded record says."""
        planner, namespace, subject = self.planner, self.namespace, move.subject
        if isinstance(subject, ParamCopy):
            planner.settle_made(namespace, subject, error, source=move.source)
            return
        if move.kind is MoveKind.WRITE:
            assert move.located is not None
            planner.working.settle_write(namespace, subject, move.located._replace(root=root), error)
        else:
            planner.working.settle_load(namespace, subject, optimizer_step=optimizer_step, last_apply=last_apply, error=error)
        planner.after_working(namespace, subject)


class World(PlannerAlone):
    """A planner whose moves are done at once. Owner of the count of what moved."""

    def __init__(
        self, schema: Schema, keys: KeySpace, *, param_slots: int, working_slots: int, param_policy: MakePolicy,
        working_policy: MakePolicy,
    ) -> None:  # fmt: skip
        super().__init__(
            schema, keys, param_slots=param_slots, working_slots=working_slots, param_policy=param_policy,
            working_policy=working_policy, extents=4 * (len(keys) + 64),
        )  # fmt: skip
        self.moved = Moved()

    # --- calls

    def open(self, *, is_writer: bool) -> View:
        """Opens the only view there is: it may lease all slots but the reserve."""
        slots = share_of(self.param_arena.planned_slots, is_writer=True, reader_slots=0)
        opening = Opening(WriterGroup() if is_writer else None, slots)
        return self.planner.views.open(self.namespace, opening, step=None if is_writer else 0)

    def lease(self, view: View, keys: Sequence[ExpertKey]) -> None:
        """Acquires `keys`, moving whatever must be moved, and releases them."""
        request = LeaseRequest(view, next(self.ids), list(keys))
        self.planner.leases.request_lease(request)
        self.finish()
        assert request.is_finished
        assert request.error is None
        self.planner.leases.release(view, request.lease_id)
        self.finish()

    def begin_apply(self, keys: Sequence[ExpertKey]) -> None:
        self.namespace.writing.pending = {key: (GradientRange(NoMemory(1), 0, 1),) for key in keys}
        self.planner.claims.begin(self.namespace)
        self.planner.reserve_extents(self.namespace, keys)
        self.finish()

    def hold(self, key: ExpertKey, spared: Container[ExpertKey] = ()) -> SlotRequest:
        """Asks for the key's working copy; finished when it is in a slot and held. spared: keys that are not evicted for it."""
        request = SlotRequest(self.namespace, key, spared=spared)
        self.planner.working.request_slot(request)
        return request

    def update(self, request: SlotRequest) -> None:
        """Waits for the held copy and changes it, with its `param` copy where that finds a slot."""
        while not request.is_finished:
            assert self.finish(), f"{request.key} waits for a slot that nothing will free"
        working = self.namespace.residency.working[request.key]
        update = self.planner.plan_update(self.namespace, working, Claims(AdamW(lr=0.0), 1.0, {working.key: ()}))
        self.planner.settle_update(self.namespace, update, None)
        self.finish()

    # --- moves

    def finish(self) -> bool:
        """Does everything that was decided, and what follows from it. False if nothing was decided."""
        outbox, did = self.planner.outbox, False
        while outbox.moves:
            moves, outbox.moves = outbox.moves, []
            for move in moves:
                did = True
                self._count(move)
                self.settle(move)
        outbox.promoted.clear()
        outbox.finished.clear()
        outbox.woken.clear()
        return did

    def _count(self, move: Move) -> None:
        moved, schema = self.moved, self.schema
        if move.kind is MoveKind.LOAD_PARAM:
            moved.param_loads += 1
            moved.bytes_read += param_read_bytes(schema)
        elif move.kind is MoveKind.MATERIALISE:
            moved.materialised += 1
        elif move.kind is MoveKind.LOAD_WORKING:
            moved.working_loads += 1
            moved.bytes_read += schema.record_bytes
        elif move.kind is MoveKind.WRITE:
            moved.writes += 1
            moved.bytes_written += schema.record_bytes


def _arena(slot_bytes: int, slots: int, policy: Policy, *, segment: int) -> Arena:
    arena = Arena(slot_bytes=slot_bytes, planned_slots=slots, policy=policy)
    arena.add_segment(segment, NoMemory(slots * slot_bytes), slots=slots)
    return arena


def param_read_bytes(schema: Schema) -> int:
    """Bytes that a load of `param` reads of a record: the header and the masters it is made from, or all of it."""
    if not schema.is_trainable:
        return schema.record_bytes
    masters = sum(field.length_bytes for field in schema.stored.fields if field.name.startswith("master/"))
    return schema.stored.header_bytes + masters
