"""A writer's calls on records: their first values, gradients, and the steps of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paramstore.core.arguments import flag, function, indices, mapping, number, whole_number
from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW, Options
from paramstore.errors import CapacityError
from paramstore.wire import messages
from paramstore.wire.options import apply_message, begin_message
from paramstore_client.connection import answers
from paramstore_client.connection.answers import Result
from paramstore_client.connection.ticket import Ticket
from paramstore_client.gradients.pending import Gradients
from paramstore_client.handle.base import ANSWER_GRACE_S, Handle, plain_keys
from paramstore_client.handle.given_heat import Heat, packed_heat
from paramstore_client.handle.initial_values import PUTS_IN_FLIGHT, InitialValue, put_initial_values
from paramstore_client.handle.initialization import Initialization
from paramstore_client.ranges import PUSH, named


class Updates(Handle):
    """The part of `Namespace` that changes records."""

    @property
    def pending_count(self) -> int:
        """How many keys have pending gradients that this handle pushed."""
        return len(self._pending)

    def initialize(self, fn: InitialValue) -> None:
        """Gives every key its first value, version 0, and returns when all are whole on the volumes.

        fn: called with each (layer, expert) in key order; returns {field: tensor}, in fp32 or the param dtype. Starts
        over from nothing. With several ranks each gives its share: the keys whose place in key order, modulo `world_size`,
        is its `rank`. Raises StepOutOfOrder after the first commit, SchemaMismatch, CapacityError, VolumeError.
        """
        self._check_open()
        self._check_writes("initialize")
        function("fn", fn)
        ours = self.keys()[self.rank :: self.world_size]
        try:
            self._consume(messages.InitializeBegin(self._next_id(), self._handle), "initialize", answers.nothing).wait()
            put_initial_values(
                self._connection, self._area, self._handle, schema=self.schema, keys=ours, fn=fn, timeout_s=self._limit_s,
                puts_of_others=self._puts_of_others,
            )  # fmt: skip
        finally:
            self._count_view_change()

    def begin_initialize(
        self, *, resume: bool = True, values_in_flight: int = PUTS_IN_FLIGHT, heat: Heat | None = None
    ) -> Initialization:
        """Begins an `initialize` in steps that survive this process: `put` each of its `missing` keys, `save` now and then, `end`.

        resume: go on from what an earlier attempt saved; False, or `initialize`: start over. heat: how much the experts are to be
        used, as a trace, the path of its file or {key: number}; the hottest that fit come to the fastest volumes. Raises
        StepOutOfOrder after the first commit, VersionMismatch on an older daemon, ConfigError and UnknownKey for a heat of others.
        """
        self._check_open()
        self._check_writes("begin_initialize")
        packed = packed_heat(heat, self.space, namespace=self.name)
        try:
            return Initialization(
                self._connection, self._area, self._handle, schema=self.schema, space=self.space, timeout_s=self._limit_s,
                is_resumed=flag("resume", resume), puts_of_others=self._puts_of_others,
                values_in_flight=whole_number("values_in_flight", values_in_flight, least=1), heat=packed,
            )  # fmt: skip
        finally:
            self._count_view_change()

    @property
    def _puts_of_others(self) -> int:
        """Most initial values that other ranks put."""
        return 0 if self.world_size == 1 else len(self.space)

    def push(self, gradients: Gradients) -> None:
        """Adds `gradients` to the pending ones: {key: {field: tensor}}, every field of the schema. The tensors are copied.

        Raises SchemaMismatch, UnknownKey, or CapacityError naming the size that `--gradient-budget` would need; then
        nothing has changed.
        """

        def announce(entries: list[tuple[int, int, int, int]], is_last: bool) -> None:
            message = messages.Push(self._next_id(), self._handle, entries, is_last)
            self._send(message, "push", answers.nothing).wait()

        self._check_open()
        self._check_writes("push")
        mapping("gradients", gradients, "{key: {field: tensor}}")
        with named(PUSH):
            self._pending.push(dict(zip(plain_keys(gradients), gradients.values(), strict=True)), announce)

    def before_push(self, fn: Callable[[], object]) -> Callable[[], object]:
        """Has `fn()` called first in every push of this handle, by the pushing thread; what it raises ends the push. Returns the
        function that ends this."""
        return self._pending.before_push(function("fn", fn))

    def gradient_norm(self) -> float:
        """The L2 norm over everything pending."""
        return self._send(messages.GradientNorm(self._next_id(), self._handle), "gradient_norm", answers.real).wait()

    def apply(self, options: Options, *, grad_scale: float = 1.0) -> Ticket[Result]:
        """Makes one optimizer step over every key with pending gradients, which it consumes. Cannot be cancelled.

        options: those of the schema's optimizer. Result: {records, bytes_read, bytes_written}. An error half-way leaves the
        namespace broken: push, apply and commit raise StepFailed until `rollback`. Raises SchemaMismatch for other options,
        VersionMismatch where the daemon knows AdamW alone, StepPrepared, StepMismatch; then all is pending still.
        """
        self._check_writes("apply")
        self.schema.check_options(options)
        self._pending.check_closed("apply")
        if not isinstance(options, AdamW):
            self._connection.check_minor(messages.TRAINING_MINOR, f"apply({type(options).__name__})")
        message = apply_message(self._next_id(), self._handle, options, number("grad_scale", grad_scale))
        try:
            return self._consume(message, "apply", answers.mapping)
        finally:
            self._count_view_change()
            self._applies += 1

    def begin_apply(self, options: Options, *, grad_scale: float = 1.0) -> None:
        """Opens an `apply` before its gradients are there: each key is updated as soon as it is pushed, by all ranks, while the
        caller goes on with others; `end_apply` closes it, with the result of an `apply`, bit for bit.

        Where the gradient budget is used up, a push waits until updates have read what was pushed before, and raises WaitTimeout
        where none does within `wait_timeout_s`; ranks say with `end_layers` which layers they push no more of.

        From now on a key may be pushed once; gradients of it that come before its last one are pushed before this call. A lease of
        a key that was pushed waits for its update; of another it sees the state before. Until the end `apply`, `prepare` and, once
        a key was pushed, `commit`, `gradient_norm`, `write_back`, `evict`, `read` and `snapshot` raise StepOutOfOrder. `abort`
        gives the apply up, with StepFailed once a key was pushed: the namespace is broken until `rollback`, as after any error
        half-way. Raises StepOutOfOrder where one is open, SchemaMismatch, VersionMismatch; the next push or `end_apply` raises what
        the daemon refuses.
        """
        self._check_writes("begin_apply")
        self.schema.check_options(options)
        self._connection.check_minor(messages.TRAINING_MINOR, "begin_apply")
        message = begin_message(self._next_id(), self._handle, options, number("grad_scale", grad_scale))
        self._pending.open(
            lambda: self._send(message, "begin_apply", answers.mapping, is_cancellable=False),
            self._await_room if self._connection.minor >= messages.ROOM_MINOR else None,
        )

    def _await_room(self, keys: list[ExpertKey], timeout_s: float) -> list[ExpertKey]:
        message = messages.AwaitRoom(self._next_id(), self._handle, keys, timeout_s)
        return self._send(message, "await_room", answers.keys, timeout_s=timeout_s + ANSWER_GRACE_S).wait()

    def end_layers(self, layers: Iterable[int]) -> None:
        """Says that this rank pushes no more gradients of `layers` before `end_apply`. Keys that it has not pushed need not wait
        for the close then, nor do other ranks whose upload memory holds gradients of them. Does nothing on an older daemon.

        Raises UnknownKey, and StepOutOfOrder where no apply is open.
        """
        ended = list(indices("layers", layers))
        self._check_writes("end_layers")
        if self._connection.minor >= messages.ROOM_MINOR:
            self._send(messages.EndLayers(self._next_id(), self._handle, ended), "end_layers", answers.nothing).wait()

    def reserve_room(self) -> None:
        """Takes now the upload memory that an open apply needs at least: for two layers' gradients, beside what other handles of
        this connection have reserved. Raises CapacityError where this rank's share of the gradient budget is less, naming the
        budget that it takes; then nothing was taken. SchemaMismatch where there are no gradients."""
        self._check_open()
        self._check_writes("reserve_room")
        others = (tenant.unused_room_bytes for tenant in self._area.tenants if tenant is not self._pending)
        room_bytes, share_bytes = self._pending.room_bytes + sum(others), self._pending.share_bytes
        if share_bytes is not None and share_bytes < room_bytes:
            raise CapacityError(
                f"updates in backward of {self.name!r} need {room_bytes} bytes of upload memory, two layers' gradients beside what "
                "other namespaces of this connection have reserved; each of "
                f"{self.world_size} writers has {share_bytes}: raise gradient_budget to {room_bytes * self.world_size} bytes"
            )
        self._pending.reserve_room()

    def end_apply(self) -> Ticket[Result]:
        """Closes the apply that `begin_apply` opened: it takes all that is pending. Cannot be cancelled. Result and errors are
        those of `apply`; StepOutOfOrder where none is open."""
        self._pending.check_open("end_apply")
        try:
            return self._consume(messages.EndApply(self._next_id(), self._handle), "end_apply", answers.mapping)
        finally:
            self._count_view_change()
            self._applies += 1

    @property
    def is_applying(self) -> bool:
        """Whether `begin_apply` was called, and no `end_apply`, `abort` or `rollback` since."""
        return self._pending.is_open

    def abort(self) -> int:
        """Drops the pending gradients, and an apply that is open; returns how many keys had some."""
        return self._consume(messages.Abort(self._next_id(), self._handle), "abort", answers.number).wait()
