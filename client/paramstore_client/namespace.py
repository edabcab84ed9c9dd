"""An open namespace: the calls that a trainer or a reader makes about its experts.

Calls take effect in call order, even if their tickets are not awaited. Where several ranks write together, those that change
records run once, when all ranks have made them with equal arguments. A handle belongs to the connection it was opened
on: after the daemon went away it raises StoreUnavailable for good, and is opened again after `store.reconnect()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from paramstore.core.arguments import seconds, whole_number, wrong
from paramstore.core.key import ExpertKey
from paramstore.errors import CapacityError, LeaseError
from paramstore.wire import messages
from paramstore_client.connection import answers
from paramstore_client.connection.answers import Opened
from paramstore_client.connection.shared_socket import Connection
from paramstore_client.connection.ticket import Ticket
from paramstore_client.gradients.upload_area import UploadArea
from paramstore_client.handle.base import ANSWER_GRACE_S, lease_bounds, plain_keys
from paramstore_client.handle.extent_lease import ExtentLease
from paramstore_client.handle.lease import Lease, Releasable
from paramstore_client.handle.loans import HandleLoans
from paramstore_client.handle.parts_lease import PartsLease
from paramstore_client.handle.ranks import ALONE, Rank
from paramstore_client.handle.residency import Residency
from paramstore_client.handle.steps import Refreshed, Steps
from paramstore_client.handle.updates import Updates
from paramstore_client.ranges import ACQUIRE, named
from paramstore_client.source import LeaseKeeper

if TYPE_CHECKING:
    from torch import Tensor


class _LiveLeases(weakref.WeakSet[Releasable]):
    """The leases of a handle that live, those of extents too. Each of them keeps the set, so that it goes with the last one who
    could use the handle.

    at_end: what is done then; None for nothing.
    """

    at_end: weakref.finalize[..., _LiveLeases] | None = None


class Namespace(Updates, Residency, Steps):
    """One opening of a namespace. Owner of its leases."""

    def __init__(
        self, connection: Connection, area: UploadArea, opened: Opened, *, mode: str, is_debug: bool, ours: Rank = ALONE
    ) -> None:
        super().__init__(connection, area, opened, mode=mode, is_debug=is_debug, ours=ours)
        self._lease_slots = opened.lease_slots
        self._view_step = opened.view_step
        self._leases = _LiveLeases()

    # --- what it is ---

    @property
    def lease_slots(self) -> int:
        """How many keys this handle may have leased at once: promised when it opened, whatever others do. (A daemon that speaks an
        older protocol than 1.4 promises nothing: there it is as many as others have left.)"""
        return self._connection.lease_slots(self._handle, self._lease_slots)

    @property
    def is_debug(self) -> bool:
        """Whether its store was connected with `debug=True`."""
        return self._is_debug

    @property
    def experts(self) -> int:
        """Experts per layer."""
        return self.space.experts

    @property
    def committed_step(self) -> int | None:
        """The newest committed step this handle knows of; None before the first commit."""
        return self._committed_step

    @property
    def view_step(self) -> int | None:
        """The step a reader stands on; None for the writer, who sees its working state."""
        return self._view_step

    @property
    def epoch(self) -> int:
        """Counts reopenings as writer and rollbacks."""
        return self._epoch

    @property
    def view_change_count(self) -> int:
        """Grows with every apply, refresh, rollback and initialize of this handle: while it stands still, so do the bytes
        behind every key that this handle sees."""
        return self._view_change_count

    @property
    def store_uuid(self) -> str:
        """The store's identity for as long as its catalog lives: 32 hexadecimal digits."""
        return self._connection.store_uuid

    # --- reading ---

    def acquire(self, keys: Iterable[ExpertKey], part: str = "param", timeout_s: float | None = None) -> Lease:
        """A lease on all of `keys`, as soon as they are resident. Use it as a context manager.

        timeout_s: None means the daemon's `wait_timeout_s`. Raises CapacityError above `lease_slots` keys, LeaseError
        when only leases of this caller stand in the way, WaitTimeout, UnknownKey, StepDropped, CorruptRecord; then
        nothing is leased.
        """
        try:
            return self._acquire(keys, part, timeout_s)
        except LeaseError:
            if not (keepers := self._connection.segments.keepers(self._handle)):
                raise
            for keeper in keepers:
                keeper.give_back()
            return self._acquire(keys, part, timeout_s)

    def _acquire(self, keys: Iterable[ExpertKey], part: str, timeout_s: float | None) -> Lease:
        ticket = self.begin_acquire(keys, part, timeout_s)
        try:
            with named(ACQUIRE):
                return ticket.wait()
        except BaseException:
            ticket.abandon()
            raise

    def begin_acquire(
        self, keys: Iterable[ExpertKey], part: str = "param", timeout_s: float | None = None
    ) -> Ticket[Lease]:
        """Begins an `acquire` and returns at once: `lease = await ns.begin_acquire(keys)`. Cancel a ticket nobody waits for."""
        wanted = plain_keys(keys)
        limit_s = self.wait_timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)
        grant = partial(
            Lease, self._connection, namespace=self.name, part=self.schema.part(part), keys=wanted, all_held=self._leases,
            is_debug=self._is_debug,
        )  # fmt: skip

        message = messages.Acquire(self._next_id(), self._handle, wanted, part, limit_s)
        return self._send(message, "acquire", grant, timeout_s=limit_s + ANSWER_GRACE_S)

    def together(self) -> AbstractContextManager[None]:
        """What this thread asks for and releases inside is sent in one go, at the end or before a wait: each call that sends wakes
        the daemon. The end raises WaitTimeout where the daemon takes nothing off its socket; what was asked stays asked."""
        return self._connection.together()

    def acquire_arriving(
        self, keys: Sequence[ExpertKey], timeout_s: float | None = None, *, may_pass: bool = False
    ) -> PartsLease:
        """A lease on the part `param` of `keys`: of all at once, or where they exceed `lease_slots` and may pass, of one part after
        the other as it is gone through. Raises what `acquire` raises."""
        return PartsLease(self, keys, timeout_s=timeout_s, may_pass=may_pass)

    def read(self, key: ExpertKey) -> dict[str, Tensor]:
        """Copies of the key's whole record: every stored field (`master/…`, `exp_avg/…`), and param fields by name."""
        from paramstore_client import tensors

        (wanted,) = plain_keys([key])
        self.space.check([wanted], namespace=self.name)
        record_bytes = self.schema.record_bytes
        (place,) = self._area.take(1, record_bytes, most_bytes=record_bytes)
        message = messages.Read(self._next_id(), self._handle, wanted, place.segment, place.offset_bytes)
        ticket = self._send(message, "read", answers.mapping, is_cancellable=False)
        try:
            ticket.wait()
            return tensors.stored_copies(self.schema, self._area.mapping(place.segment), place.offset_bytes)
        finally:
            # A wait that was given up leaves the range to the daemon, which may still write there.
            if ticket.is_settled:
                self._area.give_back([place])

    def refresh(self, step: int | None = None) -> Refreshed:
        """Moves a reader to the newest committed step, or to `step`, and returns it with how much has changed. Copies in host
        memory of what has not changed are used on; what has changed is loaded when it is asked for. Raises StepDropped where there
        is no such step any more, and VersionMismatch for a `step` with a daemon before protocol 1.6; then nothing has changed."""
        if step is not None:
            self._connection.check_minor(messages.FOLLOW_MINOR, "refresh(step)")
            step = whole_number("step", step)
            newest = self.steps()[-1:]  # a rollback may have been since; asked before anything moves
        is_counted = self._connection.minor >= messages.STEPS_MINOR

        def moved(answer: object) -> Refreshed:
            there = Refreshed.counted(answer) if is_counted else Refreshed.uncounted(answer)
            if self.mode == "read":
                self._view_step = int(there)
            self._committed_step = int(there) if step is None else max([*newest, int(there)])
            return there

        message = messages.Refresh(self._next_id(), self._handle, is_counted, step)
        try:
            # Whoever reads the answer notes it: an interrupt of the wait leaves that to the next call.
            ticket = self._send(message, "refresh", moved)
            self._count_view_change()  # the view moves when the daemon reads this, and the answer waits for the counting
            return ticket.wait()
        finally:
            self._count_view_change()

    # --- other handles on it ---

    def snapshot(self, step: int) -> Namespace:
        """Keeps `step` until `drop_snapshot(step)`, whatever happens to this process or the daemon, and opens a reader on it.

        Needs room on the volumes for the namespace's state again. May be called on any handle, also for a step that is one, and
        waits for a commit under way. Raises StepDropped, and CapacityError naming the bytes that are missing. Where only the
        reader could not be opened the step is a snapshot all the same.
        """
        step = whole_number("step", step)
        self._send(messages.Snapshot(self._next_id(), self._handle, step), f"snapshot {step}", answers.nothing).wait()
        return self.reader(step)

    def reader(self, at: int | None = None, *, min_lease_slots: int = 0, max_lease_slots: int | None = None) -> Namespace:
        """Opens another handle on the same namespace: a reader standing on step `at`, or on the newest committed one.
        min_lease_slots, max_lease_slots: as for `Store.open_namespace`. Raises StepDropped, CapacityError; StepFailed before the
        first commit."""
        at = None if at is None else whole_number("at", at)
        least, most = lease_bounds(self._connection, "reader", min_lease_slots, max_lease_slots)
        message = messages.OpenNamespace(self._next_id(), self.name, "read", at, None, least, most)
        opened = self._send(message, f"open_namespace at {at}", partial(answers.result_of, kind=Opened)).wait()
        return Namespace(self._connection, self._area, opened, mode="read", is_debug=self._is_debug)

    # --- leases that stand ---

    def let_stand(self, keeper: LeaseKeeper) -> HandleLoans | None:
        """Notes that `keeper` keeps leases beyond their use, for as long as it lives, or until it leaves: it is asked to give them
        back where `acquire` finds none left, and when the session ends. Returns where it may borrow slots; None where nothing may
        stand: in debug mode a lease ends when its user says so, and a daemon that speaks an older protocol than 1.4 promises no
        slots."""
        if not all(callable(getattr(keeper, name, None)) for name in ("give_back", "let_go")):
            raise wrong("keeper", keeper, "who has give_back() and let_go()")
        if self._is_debug or self._connection.minor < messages.PROMISE_MINOR:
            return None
        leave = self._connection.segments.add_keeper(self._handle, keeper)
        return HandleLoans(self._connection, self._handle, name=self.name, is_reader=self.mode == "read", leave=leave)

    def check_usable(self) -> None:
        """Returns while the handle is open, in its own process; else raises UnknownNamespace, StoreUnavailable or ForkedClient."""
        self._check_open()
        self._connection.check_usable()

    # --- its end ---

    def close(self) -> None:
        """Ends the handle and its leases; pending gradients are dropped. Idempotent, and quiet when the daemon is gone."""
        if self._is_closed:
            return
        for lease in list(self._leases):
            lease.release()
        self._pending.end()
        if self._connection.is_failed:
            self._is_closed = True
            return
        if self._leases.at_end is not None:
            self._leases.at_end.detach()
        ticket = self._consume(messages.CloseNamespace(self._next_id(), self._handle), "close", answers.nothing)
        self._is_closed = True
        ticket.wait()

    def __enter__(self) -> Namespace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else self.mode if self._view_step is None else f"{self.mode} at {self._view_step}"
        size = f"{len(self.layers)} x {self.experts} experts"
        return f"<Namespace {self.name!r}, {size}, committed {self._committed_step}, {state}, {self.lease_slots} lease slots>"


def close_when_dropped(reader: Namespace) -> None:
    """Has the handle closed once nobody has it any more, nor a lease of it: what it was promised is others' then."""
    leases = reader._leases
    if leases.at_end is None:
        leases.at_end = weakref.finalize(leases, _close_dropped, reader._connection, reader._handle, reader.name)
        leases.at_end.atexit = False


def acquire_extents(reader: Namespace, keys: Iterable[ExpertKey], *, timeout_s: float | None = None) -> ExtentLease:
    """A lease on the places of `keys` on the volumes, for who reads whole records from there and proves them. timeout_s: None for
    the connection's. Raises WaitTimeout, VersionMismatch from a daemon before protocol 1.10, LeaseError where it leases none,
    SchemaMismatch in a namespace that is trained, ConfigError for no key, CapacityError, UnknownKey, StepDropped, CorruptRecord."""
    connection, wanted = reader._connection, plain_keys(keys)
    connection.check_minor(messages.EXTENTS_MINOR, "acquire_extents")
    if not wanted:
        raise wrong("keys", keys, "one key at least")
    if len(wanted) > messages.EXTENT_KEYS_MAX:
        raise CapacityError(f"{len(wanted)} extents in one call; the limit is {messages.EXTENT_KEYS_MAX}: ask in parts")
    grant = partial(
        ExtentLease, connection, namespace=reader.name, part=reader.schema.stored, keys=wanted, all_held=reader._leases
    )
    message = messages.AcquireExtents(reader._next_id(), reader._handle, wanted)
    return reader._send(message, "acquire_extents", grant, is_cancellable=False).wait(timeout_s)


def _close_dropped(connection: Connection, handle: int, name: str) -> None:
    """Closes a handle. The collector calls it, on any thread at any place: it waits for nothing."""
    request = messages.CloseNamespace(connection.next_id(), handle)
    ticket = Ticket(
        connection, request.id, what=f"close on {name!r}", convert=answers.nothing, timeout_s=connection.timeout_s,
        on_settled=None, is_cancellable=False,
    )  # fmt: skip
    ticket.abandon()
    connection.post(request, ticket)
