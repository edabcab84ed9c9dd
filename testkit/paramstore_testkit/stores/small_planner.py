"""A planner over one small namespace, without loop, volume or worker: the test does the workers' part.

`start` takes what the planner decided, `land` settles a move as `engine.transfers` would. Every key but those of an empty
namespace is committed at step 0 with version 0 of epoch 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.location import Extent, Identity
from paramstore.core.optimizers import AdamW
from paramstore.core.residency import Working
from paramstore.core.schema import Schema
from paramstore.engine.planner.planner import Update
from paramstore.engine.planner.promises import Opening
from paramstore.engine.tables.apply import Claims, GradientRange
from paramstore.engine.tables.arena import Arena
from paramstore.engine.tables.copies import Cut, ParamCopy, WorkingCopy
from paramstore.engine.tables.moves import Move, MoveKind
from paramstore.engine.tables.namespace import LeaseRequest, NamespaceState, View, WriterGroup
from paramstore.engine.tables.requests import PrefetchRequest, SlotRequest, Urgency
from paramstore.errors import ParamStoreError
from paramstore.policy.base import Policy
from paramstore.policy.lru import Lru
from paramstore.sim.world import PlannerAlone
from paramstore.storage.catalog.base import StepRow
from paramstore.storage.format.apply_log import pack_log
from paramstore_testkit.disks.machine import PlainSegment
from paramstore_testkit.stores.settling import begin_epoch, cut_of, free, settle, settle_cut

SCHEMA = Schema.adamw({"w": (3, 5), "v": (7,)}, param_dtype="float32")
OPTIONS = AdamW()
HELD_STEPS = 2
"""How many older steps stay for readers: it knows nothing of room."""


class SmallPlanner(PlannerAlone):
    """A planner whose test carries out its moves. Owner of the moves under way."""

    def __init__(
        self, *, experts: int = 4, param_slots: int = 3, working_slots: int = 2, extents: int = 32, schema: Schema = SCHEMA,
        is_committed: bool = True, policy: Callable[[], Policy] = Lru, reader_slots: int | None = None,
    ) -> None:  # fmt: skip
        keys = KeySpace.of(1, experts)
        super().__init__(
            schema, keys, param_slots=param_slots, working_slots=working_slots, param_policy=lambda _: policy(),
            working_policy=lambda _: policy(), extents=extents, is_committed=is_committed, reader_slots=reader_slots,
        )  # fmt: skip
        self.keys: list[ExpertKey] = list(keys)
        self.updating: dict[WorkingCopy, Update] = {}
        """The newest update of every copy."""
        self.under_way: list[Move] = []
        self._roots = count(100)

    # --- calls

    def writer(self, *, slots: int | None = None) -> View:
        """Opens a writer. slots: the promise of the view; None: all but one, since most tests are about one view."""
        return self._promised(self.planner.views.open(self.namespace, Opening(WriterGroup())), slots)

    def reader(self, step: int = 0, *, slots: int | None = None) -> View:
        """Opens a reader of `step`. slots: as for `writer`."""
        return self._promised(self.planner.views.open(self.namespace, Opening(), step=step), slots)

    def _promised(self, view: View, slots: int | None) -> View:
        view.lease_slots = max(1, self.param_arena.planned_slots - 1) if slots is None else slots
        return view

    def lease(self, view: View, *keys: ExpertKey) -> LeaseRequest:
        request = LeaseRequest(view, next(self.ids), keys)
        self.planner.leases.request_lease(request)
        return request

    def leased(self, view: View, *keys: ExpertKey) -> LeaseRequest:
        """Leases keys, and lands their copies."""
        request = self.lease(view, *keys)
        self.land_all()
        assert request.is_finished
        assert request.error is None
        return request

    def release(self, request: LeaseRequest) -> None:
        self.planner.leases.release(request.view, request.lease_id)

    def prefetch(self, view: View, *keys: ExpertKey, part: str = "param") -> PrefetchRequest:
        request = PrefetchRequest(self.namespace, part, None)
        self.planner.leases.request_prefetch(request, view, keys)
        return request

    def hold(self, key: ExpertKey, *, is_fill: bool = False) -> SlotRequest:
        request = SlotRequest(self.namespace, key, is_fill=is_fill)
        self.planner.working.request_slot(request)
        return request

    def held(self, key: ExpertKey) -> WorkingCopy:
        """Holds the key's working copy once more, loaded."""
        request = self.hold(key)
        self.land_all()
        assert request.is_finished
        assert request.error is None
        return self.namespace.residency.working[key]

    def unhold(self, working: WorkingCopy) -> None:
        self.planner.working.unhold(self.namespace, working)
        self.planner.after_working(self.namespace, working)

    def begin_apply(self, *keys: ExpertKey) -> None:
        """Calls an apply with gradients of `keys`; nothing of it has run."""
        memory = PlainSegment(4096)
        self.namespace.writing.pending = {key: (GradientRange(memory, 0, 4096),) for key in keys}
        claimed = self.planner.claims.begin(self.namespace, OPTIONS)
        self.planner.reserve_extents(self.namespace, claimed)

    def begin_update(self, key: ExpertKey, *, is_held: bool = False) -> Update:
        """Begins the update of `key` in a worker, with a gradient. is_held: its copy is held by the caller."""
        working = self.namespace.residency.working[key] if is_held else self.held(key)
        gradient = GradientRange(PlainSegment(4096), 0, 4096)
        update = self.planner.plan_update(self.namespace, working, Claims(OPTIONS, 1.0, {working.key: (gradient,)}))
        self.updating[working] = update
        return update

    def settle_update(self, update: Update, error: ParamStoreError | None = None) -> None:
        self.planner.settle_update(self.namespace, update, error)

    def update(self, *keys: ExpertKey, error: ParamStoreError | None = None) -> None:
        """Makes an apply of `keys`, from its call to its end."""
        self.begin_apply(*keys)
        self.namespace.writing.applies += 1
        for key in keys:
            self.settle_update(self.begin_update(key), error)
            self.land_all()

    def cut(self) -> Cut:
        return cut_of(self.planner, self.namespace)

    def commit(self, step: int) -> None:
        """Makes a commit of everything so far, from its cut to its end."""
        self.publish(self.cut(), step)

    def publish(self, cut: Cut, step: int) -> None:
        for working in list(cut.awaited()):
            self.write(working.key)
        row = StepRow(step, cut.sequence, step, len(cut.records), b"", cut.applies, log=pack_log(cut.log))
        older = sorted(set(self.namespace.held_steps()) - self.namespace.steps.ledger.visible_steps((), published=step))
        self.planner.views.drop_readers(self.namespace, older[:-HELD_STEPS])
        publication = self.namespace.steps.ledger.plan_publish(row, cut.located(), self.namespace.held_steps())
        settle(self.namespace.steps.ledger, publication)
        free(self.space, publication.freed)
        settle_cut(self.planner, self.namespace, is_published=True)

    def begin_write(self, key: ExpertKey, *, urgency: Urgency = Urgency.WRITE_BACK) -> Move:
        """Begins the write of a dirty record in a worker."""
        working = self.namespace.residency.working[key]
        assert self.planner.working.begin_write(self.namespace, working, urgency)
        self.start()
        (move,) = (move for move in self.under_way if move.subject is working)
        return move

    def write(self, key: ExpertKey) -> None:
        if self.namespace.residency.working[key].state == "dirty":
            self.begin_write(key)
        self.land_all()

    def rollback(self, step: int | None = None) -> None:
        """Goes back to `step` (None: the committed one), in a new epoch. Readers of later steps have lost them."""
        publication = self.namespace.steps.ledger.plan_rollback(self.namespace.steps.committed_step if step is None else step)
        self.planner.views.drop_readers(self.namespace, [dropped for _, dropped in publication.drop_steps])
        settle(self.namespace.steps.ledger, publication)
        self.namespace.writing.applies, self.namespace.writing.log = (
            publication.namespace.applies,
            self.namespace.steps.ledger.newest_log,
        )
        begin_epoch(self.planner, self.namespace, publication.freed)

    # --- workers

    def start(self) -> list[Move]:
        """Takes the moves decided since the last call: workers have them now, and their extents are pinned."""
        outbox = self.planner.outbox
        moves, outbox.moves = outbox.moves, []
        for move in moves:
            if move.located is not None:
                self.space.pin(move.located.extent)
        self.under_way.extend(moves)
        return moves

    def land(self, move: Move, error: ParamStoreError | None = None) -> None:
        """Settles `move`, with which a worker is done."""
        self.start()
        self.under_way.remove(move)
        if move.located is not None:
            self.space.unpin(move.located.extent)
        self.settle(move, error, root=next(self._roots), optimizer_step=3, last_apply=2)

    def land_all(self, error: ParamStoreError | None = None) -> None:
        while self.start() or self.under_way:
            self.land(self.under_way[0], error)

    # --- looking

    def copy(self, key: ExpertKey, version: int = 0, epoch: int = 1) -> ParamCopy | None:
        return self.namespace.residency.find_copy(key, Identity(epoch, version))

    def kinds(self, moves: Sequence[Move]) -> list[tuple[MoveKind, ExpertKey]]:
        return [(move.kind, move.subject.key) for move in moves]

    def picture(self) -> object:
        """Gives every table as plain values: equal pictures mean that nothing changed."""
        namespace, outbox = self.namespace, self.planner.outbox
        copies = {
            key: [(c.identity, c.state, c.slot, c.leases, c in namespace.residency.prefetched, len(c.waiters)) for c in found]
            for key, found in namespace.residency.copies.items()
        }
        working = {
            key: (
                w.state, w.slot, w.identity, w.target, w.uncommitted, w.reserved, w.holders, namespace.steps.is_cut(w),
                len(w.requests),
            )
            for key, w in namespace.residency.working.items()
        }
        arenas = [
            (list(arena.waiting), [arena.slots.is_taken(slot) for slot in range(arena.slots.count)])
            for arena in (self.param_arena, self.working_arena)
        ]
        views = [(sorted(view.leases), {c.place: n for c, n in view.leased.items()}) for view in namespace.views]
        decided = [len(box) for box in (outbox.moves, outbox.promoted, outbox.finished, outbox.woken)]
        return copies, working, arenas, views, decided, self.space.stats(), changed_keys(namespace), repr(namespace.stats)

    def check(self) -> None:
        """Checks that every taken slot and extent has exactly one owner. Nothing may be under way."""
        namespace = self.namespace
        assert not self.under_way
        copies = [copy.slot for found in namespace.residency.copies.values() for copy in found]
        resident = [working.slot for working in namespace.residency.resident.values() if working.slot is not None]
        if self.param_arena is self.working_arena:
            copies, resident = copies + resident, copies + resident
        assert sorted(copies) == taken(self.param_arena)
        assert sorted(resident) == taken(self.working_arena)
        held = held_extents(namespace)
        assert len(set(held)) == len(held)
        (stats,) = self.space.stats()
        used_bytes = stats.size_bytes - stats.free_bytes - stats.quarantined_bytes
        assert used_bytes == len(held) * namespace.schema.record_bytes


def held_extents(namespace: NamespaceState) -> list[Extent]:
    """Lists the extents that belong to the namespace: those of its rows, and those uncommitted or reserved."""
    copies = namespace.residency.working.values()
    uncommitted = [working.uncommitted.extent for working in copies if working.uncommitted is not None]
    return [*namespace.steps.ledger.extents(), *uncommitted, *(copy.reserved for copy in copies if copy.reserved is not None)]


def taken(arena: Arena) -> list[int]:
    return [slot for slot in range(arena.slots.count) if arena.slots.is_taken(slot)]


A, B, C, D = ((0, expert) for expert in range(4))
lease_desk = partial(SmallPlanner, param_slots=5)
"""Makes a planner with slots for every key beside the reserve: for tests of leases."""
working_desk = partial(SmallPlanner, param_slots=4)
"""Makes a planner with fewer working slots than keys: for tests of working copies."""
cut_desk = partial(SmallPlanner, param_slots=6, working_slots=3)
"""Makes a planner with slots to spare: for tests of cuts and rollbacks."""


def changed_keys(namespace: NamespaceState) -> list[ExpertKey]:
    """The keys that the next commit publishes, sorted."""
    return sorted(working.key for working in namespace.steps.changed)


def in_state(state: Working) -> tuple[SmallPlanner, WorkingCopy]:
    """Makes a planner whose key A is in `state`."""
    small = working_desk(working_slots=3)
    if state in (Working.DIRTY, Working.WRITING):
        small.update(A)
        if state is Working.WRITING:
            small.begin_write(A)
    elif state is Working.UPDATING:
        small.begin_apply(A)
        small.begin_update(A)
    elif state is Working.LOADING:
        small.hold(A)
        small.start()
    elif state is Working.CLEAN:
        small.unhold(small.held(A))
    working = small.namespace.residency.working[A]
    assert working.state is state
    return small, working
