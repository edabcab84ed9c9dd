"""An open namespace: what a trainer or a reader does with its experts.

Calls take effect in call order, even if their tickets are not awaited. Where several ranks write together, those that change
records run once, when all ranks have made them with equal arguments. A handle belongs to the connection it was opened
on: after the daemon went away it raises StoreUnavailable for good, and is opened again after `store.reconnect()`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.optimizers import AdamW, Options
from paramstore.core.schema import Schema
from paramstore.core.visits import Visits, apply_visits, ring_visits, training_visits
from paramstore.errors import CapacityError, ConfigError, ParamStoreError, ProtocolError, UnknownNamespace
from paramstore.wire import messages
from paramstore.wire.messages import KEYS_MAX, TRAINING_MINOR, Granted, Request
from paramstore.wire.options import apply_message
from paramstore_client import answers
from paramstore_client.answers import Opened, Result
from paramstore_client.claims import Consumer
from paramstore_client.connection import Connection
from paramstore_client.gradients import Gradients, PendingGradients
from paramstore_client.initial_values import PUTS_IN_FLIGHT, InitialValue, put_initial_values
from paramstore_client.initialization import Initialization
from paramstore_client.lease import Lease
from paramstore_client.ranks import ALONE, Rank
from paramstore_client.segments import BeforeUnmap
from paramstore_client.steps import Steps
from paramstore_client.ticket import Ticket
from paramstore_client.upload import UploadArea

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

ANSWER_GRACE_S = 1.0
"""How long after a deadline that the daemon keeps itself its answer is still waited for: it says who was in the way."""


class Namespace(Steps):
    """One opening of a namespace. Owner of its pending gradients and of what it knows of the chain of commits."""

    def __init__(
        self, connection: Connection, area: UploadArea, opened: Opened, *, mode: str, is_debug: bool, ours: Rank = ALONE
    ) -> None:
        self.name = opened.name
        self._ours = ours
        self.mode = mode
        self.schema = Schema.from_description(opened.schema)
        self.space = KeySpace.of(opened.layers, opened.experts)
        self._opened_lease_slots = opened.lease_slots
        self.wait_timeout_s = opened.wait_timeout_s
        self._committed_step = opened.committed_step
        self._view_step = opened.view_step
        self._epoch = opened.epoch
        self._handle = opened.handle
        self._connection = connection
        self._area = area
        self._is_debug = is_debug
        self._is_closed = False
        self._view_changes = itertools.count(1)
        self._view_change_count = 0
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._pending = PendingGradients(area, name=self.name, schema=self.schema, space=self.space)

    # --- what it is ---

    @property
    def lease_slots(self) -> int:
        """How many keys this handle may have leased at once. It falls when others open the namespace."""
        return self._connection.lease_slots(self._handle, self._opened_lease_slots)

    @property
    def is_debug(self) -> bool:
        """Whether its store was connected with `debug=True`."""
        return self._is_debug

    @property
    def layers(self) -> tuple[int, ...]:
        """The indices of the layers that have experts, ascending."""
        return self.space.layers

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
    def rank(self) -> int:
        """Which of the `world_size` processes this is that write together; 0 where it writes alone."""
        return self._ours.rank

    @property
    def world_size(self) -> int:
        """How many processes write together: with more than one, calls that change records are collective."""
        return self._ours.world_size

    @property
    def view_change_count(self) -> int:
        """Grows with every apply, refresh, rollback and initialize of this handle: while it stands still, so do the bytes
        behind every key that this handle sees."""
        return self._view_change_count

    @property
    def store_uuid(self) -> str:
        """Which store this is, for as long as its catalog lives: 32 hexadecimal digits."""
        return self._connection.store_uuid

    @property
    def pending_count(self) -> int:
        """How many keys have pending gradients that this handle pushed."""
        return len(self._pending)

    def keys(self) -> list[ExpertKey]:
        """All expert keys, in key order."""
        return list(self.space)

    # --- reading ---

    def prefetch(
        self, keys: Iterable[ExpertKey], part: str = "param", *, deadline_s: float | None = None
    ) -> Ticket[Result]:
        """Asks for `keys` ahead of use and returns at once. deadline_s: seconds from now until they are needed.

        Result: {loaded, resident, skipped, bytes}: what did not fit is skipped, and is no error.
        """
        wanted = self._key_list(keys)
        message = messages.Prefetch(self._next_id(), self._handle, wanted, part, deadline_s)
        return self._send(message, "prefetch", answers.mapping)

    def acquire(self, keys: Iterable[ExpertKey], part: str = "param", timeout_s: float | None = None) -> Lease:
        """A lease on all of `keys`, as soon as they are resident. Use it as a context manager.

        timeout_s: None means the daemon's `wait_timeout_s`. Raises CapacityError above `lease_slots` keys, LeaseError
        when only leases of this caller stand in the way, WaitTimeout, UnknownKey, StepDropped, CorruptRecord; then
        nothing is leased.
        """
        ticket = self.begin_acquire(keys, part, timeout_s)
        try:
            return ticket.wait()
        except BaseException:
            ticket.abandon()
            raise

    def begin_acquire(
        self, keys: Iterable[ExpertKey], part: str = "param", timeout_s: float | None = None
    ) -> Ticket[Lease]:
        """As `acquire`, but returns at once: `lease = await ns.begin_acquire(keys)`. Cancel a ticket nobody waits for."""
        wanted = self._key_list(keys)
        limit_s = self.wait_timeout_s if timeout_s is None else timeout_s
        held_part = self.schema.part(part)

        def grant(answer: object) -> Lease:
            if not isinstance(answer, Granted) or len(answer.slots) != len(wanted):
                raise ProtocolError(f"no lease of {len(wanted)} keys came for an acquire of as many")
            lease = Lease(
                self._connection, answer.id, namespace=self.name, part=held_part, keys=wanted, slots=answer.slots,
                is_debug=self._is_debug,
            )  # fmt: skip
            self._leases.add(lease)
            return lease

        message = messages.Acquire(self._next_id(), self._handle, wanted, part, limit_s)
        return self._send(message, "acquire", grant, timeout_s=limit_s + ANSWER_GRACE_S)

    def read(self, key: ExpertKey) -> dict[str, Tensor]:
        """Copies of the key's whole record: every stored field (`master/…`, `exp_avg/…`), and param fields by name."""
        from paramstore_client import tensors

        (wanted,) = self._key_list([key])
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

    def refresh(self) -> int | None:
        """Moves a reader to the newest committed step, and returns it."""
        message = messages.Refresh(self._next_id(), self._handle)
        try:
            step = self._send(message, "refresh", answers.optional_number).wait()
        finally:
            self._count_view_change()
        self._committed_step = step
        if self.mode == "read":
            self._view_step = step
        return step

    # --- training ---

    def initialize(self, fn: InitialValue) -> None:
        """Gives every key its first value, version 0, and returns when all are whole on the volumes.

        fn: called with each (layer, expert) in key order; returns {field: tensor}, in fp32 or the param dtype. Starts
        over from nothing. Of several ranks each is asked for its share: the keys whose place in key order, modulo `world_size`,
        is its `rank`. Raises StepOutOfOrder after the first commit, SchemaMismatch, CapacityError, VolumeError.
        """
        self._check_open()
        ours = self.keys()[self.rank :: self.world_size]
        try:
            self._consume(messages.InitializeBegin(self._next_id(), self._handle), "initialize", answers.nothing).wait()
            put_initial_values(
                self._connection, self._area, self._handle, schema=self.schema, keys=ours, fn=fn, timeout_s=self._limit_s
            )
        finally:
            self._count_view_change()

    def begin_initialize(self, *, resume: bool = True, values_in_flight: int = PUTS_IN_FLIGHT) -> Initialization:
        """The same in steps that survive this process: `put` for each of its `missing` keys, `save` now and then, `end`.

        resume: go on from what an earlier attempt saved; False, or `initialize`: start over. Raises StepOutOfOrder after the first
        commit, VersionMismatch on an older daemon.
        """
        self._check_open()
        try:
            return Initialization(
                self._connection, self._area, self._handle, schema=self.schema, space=self.space, is_resumed=resume,
                values_in_flight=values_in_flight,
            )  # fmt: skip
        finally:
            self._count_view_change()

    def push(self, gradients: Gradients) -> None:
        """Adds `gradients` to the pending ones: {key: {field: tensor}}, every field of the schema. The tensors are copied.

        Raises SchemaMismatch, UnknownKey, or CapacityError naming the size that `--gradient-budget` would need; then
        nothing has changed.
        """

        def announce(entries: list[tuple[int, int, int, int]]) -> None:
            self._send(messages.Push(self._next_id(), self._handle, entries), "push", answers.nothing).wait()

        self._check_open()
        self._pending.push(dict(zip(self._key_list(gradients), gradients.values(), strict=True)), announce)

    def before_push(self, fn: Callable[[], object]) -> Callable[[], object]:
        """`fn()` is called first in every push of this handle, by the pushing thread; what it raises ends the push. Returns the
        function that ends this."""
        return self._pending.before_push(fn)

    def gradient_norm(self) -> float:
        """The L2 norm over everything pending."""
        return self._send(messages.GradientNorm(self._next_id(), self._handle), "gradient_norm", answers.real).wait()

    def apply(self, options: Options, *, grad_scale: float = 1.0) -> Ticket[Result]:
        """One optimizer step over every key with pending gradients, which it consumes. Cannot be cancelled.

        options: of the optimizer that the schema is for. Result: {records, bytes_read, bytes_written}. An error half-way leaves the
        namespace broken: push, apply and commit raise StepFailed until `rollback`. Raises SchemaMismatch for other options,
        VersionMismatch where the daemon knows AdamW alone, StepPrepared, StepMismatch; then all is pending still.
        """
        self.schema.check_options(options)
        if not isinstance(options, AdamW):
            self._connection.check_minor(messages.TRAINING_MINOR, f"apply({type(options).__name__})")
        message = apply_message(self._next_id(), self._handle, options, grad_scale)
        try:
            return self._consume(message, "apply", answers.mapping)
        finally:
            self._count_view_change()
            self._applies += 1

    def abort(self) -> int:
        """Drops the pending gradients; returns how many keys had some."""
        return self._consume(messages.Abort(self._next_id(), self._handle), "abort", answers.number).wait()

    # --- residency ---

    def write_back(self, keys: Iterable[ExpertKey] | None = None) -> Ticket[Result]:
        """Writes dirty records out; None: all of them. Result: {written, bytes}."""
        message = messages.WriteBack(self._next_id(), self._handle, self._keys_or_all(keys))
        return self._send(message, "write_back", answers.mapping)

    def evict(self, keys: Iterable[ExpertKey] | None = None, part: str | None = None) -> Ticket[Result]:
        """Writes back, then drops copies. Result: {evicted, skipped}; skipped keys are leased or in use."""
        message = messages.Evict(self._next_id(), self._handle, self._keys_or_all(keys), part)
        return self._send(message, "evict", answers.mapping)

    def protect(self, keys: Iterable[ExpertKey]) -> None:
        """Wishes that the `param` copies of `keys` stay resident; demand goes first."""
        self._wish(keys, is_wanted=True)

    def unprotect(self, keys: Iterable[ExpertKey]) -> None:
        """Takes the wish of `protect` back."""
        self._wish(keys, is_wanted=False)

    def declare_schedule(
        self, param_visits: Visits | None = None, optim_visits: Visits | None = None, *, micro_batches: int = 1
    ) -> None:
        """Tells in which order this handle visits its layers, so that what is needed last goes first. Ends with the handle.

        None: as a training step over all layers does (a writer's handle of a trainable schema; `micro_batches` forwards and
        backwards, then the update), else as a ring does. Cycles of one's own: see `paramstore.core.visits`; empty ones
        take the declaration back. A wrong order costs transfers, never a result. Raises ConfigError.
        """
        self._connection.check_minor(TRAINING_MINOR, "declare_schedule")
        if param_visits is None and self.mode == "write" and self.schema.is_trainable:
            is_exact = self.schema.updates == "exact"
            param_visits = training_visits(self.layers, micro_batches=micro_batches, is_exact=is_exact)
            optim_visits = apply_visits(self.layers, is_exact=is_exact) if optim_visits is None else optim_visits
        elif param_visits is None:
            param_visits = ring_visits(self.layers)
        pairs = [tuple((layer, str(kind)) for layer, kind in cycle) for cycle in (param_visits, optim_visits or ())]
        message = messages.DeclareSchedule(self._next_id(), self._handle, pairs[0], pairs[1])
        self._send(message, "declare_schedule", answers.nothing).wait()

    def residency(self) -> Result:
        """Where every expert is: {layers, experts, optim, param, heat, hbm}, lists in key order. hbm: what clients report."""
        return self._send(messages.Residency(self._next_id(), self._handle), "residency", answers.mapping).wait()

    def before_unmap(self, fn: BeforeUnmap) -> Callable[[], object]:
        """`fn(address, length_bytes)` is called before memory that this session has leased is unmapped: whoever registered
        it (cudaHostRegister) must unregister it then.

        It is called once per segment of the connection, also of its other namespaces, from any thread, and must not raise.
        Returns the function that ends this.
        """
        return self._connection.segments.before_unmap(fn)

    def report_device(
        self, *, resident: Iterable[ExpertKey], touched: Iterable[ExpertKey], bytes_resident: int
    ) -> None:
        """Tells the daemon what this process holds in HBM, and which keys it used there since the last report. One-way."""
        self._check_open()
        self._connection.post(
            messages.DeviceReport(self._handle, self._key_list(resident), self._key_list(touched), bytes_resident)
        )

    def close(self) -> None:
        """Ends the handle and its leases; pending gradients are dropped. Idempotent, and quiet when the daemon is gone."""
        if self._is_closed:
            return
        for lease in list(self._leases):
            lease.release()
        if self._connection.is_failed:
            self._is_closed = True
            return
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
        state = "closed" if self._is_closed else self.mode
        size = f"{len(self.layers)} x {self.experts} experts"
        return f"<Namespace {self.name!r}, {size}, committed {self._committed_step}, {state}>"

    def _reader(self, opened: Opened) -> Namespace:
        return Namespace(self._connection, self._area, opened, mode="read", is_debug=self._is_debug)

    # --- sending ---

    @property
    def _limit_s(self) -> float:
        """How long an answer is waited for; of ranks a little longer than the daemon waits for the others: it says who lacks."""
        return self.wait_timeout_s + (0.0 if self._ours.is_alone else ANSWER_GRACE_S)

    def _next_id(self) -> int:
        return self._connection.next_id()

    def _send(
        self, message: Request, call: str, convert: Callable[[Any], T], *, timeout_s: float | None = None,
        on_settled: Callable[[ParamStoreError | None], None] | None = None, is_cancellable: bool = True,
    ) -> Ticket[T]:  # fmt: skip
        self._check_open()
        return self._connection.request(
            message,
            what=f"{call} on {self.name!r}",
            convert=convert,
            timeout_s=self._limit_s if timeout_s is None else timeout_s,
            on_settled=on_settled,
            is_cancellable=is_cancellable,
        )

    def _consume(self, message: Consumer, call: str, convert: Callable[[Any], T]) -> Ticket[T]:
        """Sends a request that ends what is pending, unless it is refused, and cannot be cancelled."""
        return self._pending.consume(message, lambda end: self._send(message, call, convert, on_settled=end, is_cancellable=False))

    def _count_view_change(self) -> None:
        """Once the request has gone out, never before: what was acquired at the old count may be of either side of it.

        Of two threads at once the smaller number may stay: no number is drawn twice, so none can stand for two views.
        """
        self._view_change_count = next(self._view_changes)

    def _wish(self, keys: Iterable[ExpertKey], *, is_wanted: bool) -> None:
        message = messages.Protect(self._next_id(), self._handle, self._key_list(keys), is_wanted)
        self._send(message, "protect" if is_wanted else "unprotect", answers.nothing).wait()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UnknownNamespace(f"this handle of {self.name!r} was closed; open the namespace again")

    def _key_list(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """Plain tuples of plain integers, whatever kind of integers the caller counts with."""
        try:
            wanted = [(int(layer), int(expert)) for layer, expert in keys]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"keys of {self.name!r}: give (layer, expert) pairs of integers: {error}") from error
        if len(wanted) > KEYS_MAX:
            raise CapacityError(f"{len(wanted)} keys in one call; the limit is {KEYS_MAX}: ask in parts")
        return wanted

    def _keys_or_all(self, keys: Iterable[ExpertKey] | None) -> list[ExpertKey] | None:
        return None if keys is None else self._key_list(keys)
