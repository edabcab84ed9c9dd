"""The planner's tables of one namespace, its views, and who writes it.

Plain data with lookups. The planner is the only writer; everybody else reads.
Where a key's newest bytes are is told by `NamespaceState.locate`, and where on a volume by `on_volume`, by nobody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paramstore.core.apply_log import ApplyLog
from paramstore.core.counts import PartCounts
from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.location import Identity, Located
from paramstore.core.residency import MAY_MATERIALISE
from paramstore.core.schema import Schema
from paramstore.core.visits import Visits
from paramstore.engine.tables.apply import Claims, GradientRange
from paramstore.engine.tables.arena import Arena, Arenas
from paramstore.engine.tables.collective import Collective
from paramstore.engine.tables.copies import ParamCopy, ResidencyTable, WorkingCopy
from paramstore.engine.tables.counters import NamespaceStats
from paramstore.engine.tables.steps import StepTable
from paramstore.errors import LeaseError, ParamStoreError, StepDropped, StepFailed, WriterFenced
from paramstore.storage.catalog.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Declared:
    """The cycles in which a view's client visits its layers. number: counts the declarations of a namespace."""

    number: int
    param: Visits
    optim: Visits


class LoanTeller(Protocol):
    """Tells a client how many of its borrowed slots it may keep."""

    def tell(self, view: View) -> None: ...


class ViewClient(Protocol):
    """The session that a view belongs to."""

    @property
    def name(self) -> str:
        """The session's name, for people."""
        ...

    def calls_go_on(self, view: View) -> None: ...

    @property
    def loans(self) -> LoanTeller:
        """The part that tells the client of its loans."""
        ...


class WriterGroup:
    """The writers of a namespace: one view, or those of the ranks that opened it together; only the latter have `collective`."""

    def __init__(self, name: str = "", world_size: int = 1, collective: Collective | None = None) -> None:
        self.name = name
        self.world_size = world_size
        self.collective = collective
        """State of the calls that its ranks make together."""
        self.members: dict[int, View] = {}
        """Views by rank, without those that are gone."""
        self.lease_slots = 0
        """Slots that each of its views is promised."""
        self.is_fenced = False
        self._first: View | None = None

    @property
    def first(self) -> View:
        """The first rank's view, also after it is gone."""
        assert self._first is not None
        return self._first

    def join(self, view: View) -> None:
        self._first = self._first or view
        self.members[view.rank] = view

    def fence(self) -> None:
        """Fences these views, since another writer opened the namespace."""
        self.is_fenced = True
        for view in self.members.values():
            view.is_fenced = True

    def check_whole(self) -> None:
        """Raises WriterFenced, and RankLost if a rank is gone."""
        if self.is_fenced:
            raise fenced_error(self.first.namespace)
        if self.collective is not None:
            self.collective.check_whole()

    def check_in_step(self) -> None:
        """Raises RankLost, and StepMismatch while the ranks are out of step."""
        if self.collective is not None:
            self.collective.check_in_step()

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ranks whose call waits for others."""
        return () if self.collective is None else self.collective.waiting


def fenced_error(namespace: NamespaceState) -> WriterFenced:
    return WriterFenced(f"another writer opened namespace {namespace.name!r}; open it again to write on")


@dataclass(slots=True)
class Loan:
    """Slots that a reader's view may lease beyond its promise, until others are promised them. count: lent; may_keep: how many of
    them it was told to keep, fewer where some are asked back. is_silent: whether its client has let an opening's wait pass."""

    count: int = 0
    may_keep: int = 0
    is_silent: bool = False


class View:
    """A session's view of a namespace through one handle: the working state (a writer), or a step. Counts its leases."""

    def __init__(
        self, namespace: NamespaceState, *, is_writer: bool, step: int | None, lease_slots: int, most_slots: int | None = None,
        group: WriterGroup | None = None, rank: int = 0,
    ) -> None:  # fmt: skip
        self.namespace = namespace
        self.is_writer = is_writer
        self.step = step
        self.lease_slots, self.most_slots = lease_slots, most_slots
        """Slots that it may have leased at once, as it was promised when it opened; the most that it wished for, if it said so."""
        self.loan = Loan()
        self.epoch = namespace.epoch
        """Epoch in which it came to stand on its step."""
        self.group = group
        """The group that a writer belongs to; None for a reader."""
        self.rank = rank
        self.is_fenced = False
        self.is_closed = False
        self.is_dropped = False
        """Whether a reader's step had to go: its leases stay, its next acquire raises StepDropped."""
        self.protected: frozenset[ExpertKey] = frozenset()
        """Keys that its client wishes to keep in memory."""
        self.declared: Declared | None = None
        """Order in which its client visits its layers, if it declared one."""
        self.leased: dict[ParamCopy, int] = {}
        self.client: ViewClient | None = None
        """The session, which is told when collective calls go on."""
        self.device_resident: frozenset[ExpertKey] = frozenset()
        """Keys that the client's HBM tier holds, as it reported last."""
        self.device_bytes = 0
        self.leases: dict[int, LeaseRequest] = {}
        """Granted and waiting leases, by the client's id."""
        self.awaited: list[StepRequest] = []
        """Requests of its client for a newer step that are not answered."""

    @property
    def is_ranked(self) -> bool:
        """Whether it is one of several ranks that write together."""
        return self.group is not None and self.group.world_size > 1

    def locate(self, key: ExpertKey) -> tuple[Identity | None, Located | None]:
        """The identity this view sees of `key`, and its extent if the identity is a committed one."""
        if self.is_writer:
            return self.namespace.wanted(self.namespace.residency.working[key]), None
        assert self.step is not None
        located = self.namespace.steps.ledger.at(key, self.step)
        return (self.namespace.seen_at(located, self.step), located) if located is not None else (None, None)

    def check_open(self) -> None:
        """Raises the error, if there is one, for which this view gets no new leases and may not write."""
        if self.is_closed:
            raise LeaseError(f"namespace {self.namespace.name!r} was closed")
        if self.is_fenced:
            raise fenced_error(self.namespace)
        if self.is_writer and self.namespace.writing.is_rolling_back:
            raise StepFailed(f"namespace {self.namespace.name!r} is being rolled back: ask again when that call has returned")
        if self.is_dropped:
            raise StepDropped(f"step {self.step} of {self.namespace.name!r} was dropped: its room was needed; refresh()")

    @property
    def log(self) -> ApplyLog:
        """Apply log that tells which steps the records that it sees may have missed."""
        return self.namespace.writing.log if self.step is None else self.namespace.steps.ledger.log_at(self.step)


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """Request of `view` to lease all of `keys` or none. Once planned, `copies` are in order of `keys`, and `missing` of them still
    load."""

    view: View
    lease_id: int
    keys: Sequence[ExpertKey]
    copies: list[ParamCopy] = field(default_factory=list)
    missing: int = 0
    absent_count: int = 0  # of the copies, those that had no bytes yet when it was planned
    error: ParamStoreError | None = None
    is_finished: bool = False
    future: object | None = None

    def land(self, copy: WorkingCopy | ParamCopy, bytes_loaded: int) -> bool:
        self.missing -= 1
        return self.missing == 0

    def fail(self, copy: WorkingCopy | ParamCopy, error: ParamStoreError) -> bool:
        self.error = self.error or error
        return True

    def skip(self, copy: WorkingCopy | ParamCopy) -> bool:
        raise AssertionError("a copy that is leased stays")


@dataclass(slots=True, eq=False)
class StepRequest:
    """Request of `view` to be told of a newer step: newer than what, see `AwaitStep`. `future` is woken when there may be one."""

    view: View
    after: int | None
    sequence: int | None
    error: ParamStoreError | None = None
    future: object | None = None


class WritingTable:
    """Who writes a namespace, what it has pushed and applied, and why it may not write on. The parts of `NamespaceState`."""

    def __init__(self, turn: Any) -> None:
        self.group: WriterGroup | None = None
        """The group that writes now."""
        self.turn = turn
        """The store's FIFO lock: operations that change records take it, and so run in call order."""
        self.pending: dict[ExpertKey, tuple[GradientRange, ...]] = {}
        """Pending gradients of each key, in rank order."""
        self.open_apply: Claims | None = None
        """The apply that was begun before its gradients are there, and claims keys as they come."""
        self.applies = 0
        self.log = ApplyLog()
        """Apply log of an exact namespace, up to the newest apply that was called."""
        self.broken: str | None = None
        """Why push, apply and commit are refused; None while all is well."""
        self.is_initializing = False
        self.is_rolling_back = False
        """Whether some keys are rolled back already, and others not: the writer gets no leases, and pushes and applies nothing."""
        self.stop_requests = 0
        """Number of rollbacks that want the turn, plus one when the store closes: above 0, an apply stops at its next record."""

    @property
    def writer(self) -> View | None:
        """The writer's view, the first rank's where there are several; None where nobody writes."""
        return None if self.group is None else self.group.first


class NamespaceState:
    """All tables of one namespace. It has no arenas until somebody opens it."""

    def __init__(self, name: str, schema: Schema, keys: KeySpace, ledger: Ledger, *, epoch: int, turn: object = None) -> None:
        self.name = name
        self.schema = schema
        self.keys = keys
        self.epoch = epoch
        self.is_exact = schema.updates == "exact"
        """Whether an apply is a step of every record, made when it is needed."""
        self.views: list[View] = []
        self.openings = 0
        """Handles that are being opened: nothing is lent meanwhile."""
        self.loan_waiters: list[object] = []
        """Futures of those openings that wait for lent slots; opaque to the planner."""
        self.residency = ResidencyTable()
        self.steps = StepTable(ledger)
        self.writing = WritingTable(turn)
        self._memory: Arenas | None = None
        self.kept_counts: PartCounts = {}
        """What the policies of its arenas had counted when that was last read; new arenas go on from it."""
        self.stats = NamespaceStats()

    def locate(self, key: ExpertKey) -> WorkingCopy | Located | None:
        """Where the newest whole bytes of `key` are: in a slot, that of the copy returned, or on a volume; None if nowhere."""
        copy = self.residency.working[key]
        return copy if copy.state in MAY_MATERIALISE else self.on_volume(key)

    def on_volume(self, key: ExpertKey) -> Located | None:
        """The newest whole record of `key` on a volume."""
        copy = self.residency.working[key]
        return self.steps.newest(key) if copy.uncommitted is None else copy.uncommitted

    def is_seen(self, key: ExpertKey, identity: Identity) -> bool:
        """Whether some view's step, or the writer, sees exactly these bytes."""
        if self.wanted(self.residency.working[key]) == identity:
            return True
        at = self.steps.ledger.at
        return any((row := at(key, step)) is not None and self.seen_at(row, step) == identity for step in self.held_steps())

    def wanted(self, working: WorkingCopy) -> Identity | None:
        """Identity that the writer sees of a key: once every apply called so far has run, and missed steps are made."""
        target = working.target
        if (
            not self.is_exact or target is None or target.version >= self.writing.log.last
        ):  # above `last`: the open apply has claimed it
            return target
        return Identity(self.writing.log.epoch_of(self.writing.log.last), self.writing.log.last)

    def seen_at(self, located: Located, step: int) -> Identity:
        """Identity that a reader at `step` sees of the record in force there: the record's own, or that after its missed steps."""
        row = self.steps.ledger.find(step) if self.is_exact else None
        if row is None or located.identity.version == row.applies:
            return located.identity
        return Identity(self.steps.ledger.log_at(step).epoch_of(row.applies), row.applies)

    @property
    def protected(self) -> frozenset[ExpertKey]:
        """Keys that any view's client wishes to keep in memory."""
        return frozenset().union(*(view.protected for view in self.views))

    @property
    def on_devices(self) -> frozenset[ExpertKey]:
        """Keys that everybody who may lease holds in HBM: nobody lacks their host copies now."""
        leasing = [view.device_resident for view in self.views if view.lease_slots or view.leased]
        return frozenset.intersection(*leasing) if leasing else frozenset()

    @property
    def has_memory(self) -> bool:
        """Whether it has arenas: from when somebody opens it until nobody has it open and others need the memory."""
        return self._memory is not None

    @property
    def memory(self) -> Arenas:
        """Its arenas, which are there as long as it has a view."""
        assert self._memory is not None
        return self._memory

    def open_memory(self, arenas: Arenas) -> None:
        self._memory = arenas

    def close_memory(self) -> None:
        self._memory = None

    def arenas(self) -> tuple[Arena, ...]:
        """The arenas that it has now, that of working copies first: none, one or two."""
        return () if self._memory is None else self._memory.each()

    def arenas_by_part(self) -> dict[str, Arena]:
        """The arenas that it has now, each by the name of the part whose images its slots hold."""
        return {} if self._memory is None else {self.schema.stored.name: self._memory.working, "param": self._memory.param}

    def held_steps(self) -> Iterable[int]:
        """The steps on which readers stand that may ask for more of them."""
        return {view.step for view in self.views if view.step is not None and not view.is_closed and not view.is_dropped}

    def is_trainable(self) -> bool:
        return self.schema.is_trainable
