"""Calls about where experts are and where the caller wishes them. A wish costs or saves transfers; it never changes a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paramstore.core.arguments import function, seconds, whole_number
from paramstore.core.key import ExpertKey
from paramstore.core.visits import Visits, apply_visits, check_visits, ring_visits, training_visits
from paramstore.wire import messages
from paramstore.wire.messages import TRAINING_MINOR
from paramstore_client.connection import answers
from paramstore_client.connection.answers import Result
from paramstore_client.connection.segments import BeforeUnmap
from paramstore_client.connection.ticket import Ticket
from paramstore_client.handle.base import Handle, plain_keys


class Residency(Handle):
    """The part of `Namespace` that is about where bytes lie."""

    def prefetch(
        self, keys: Iterable[ExpertKey], part: str = "param", *, deadline_s: float | None = None
    ) -> Ticket[Result]:
        """Asks for `keys` ahead of use and returns at once. deadline_s: seconds from now until they are needed.

        Result: {loaded, resident, skipped, bytes}: what did not fit is skipped, and is no error.
        """
        deadline_s = None if deadline_s is None else seconds("deadline_s", deadline_s)
        message = messages.Prefetch(self._next_id(), self._handle, plain_keys(keys), self.schema.part(part).name, deadline_s)
        return self._send(message, "prefetch", answers.mapping)

    def write_back(self, keys: Iterable[ExpertKey] | None = None) -> Ticket[Result]:
        """Writes dirty records out; None: all of them. Result: {written, bytes}."""
        message = messages.WriteBack(self._next_id(), self._handle, None if keys is None else plain_keys(keys))
        return self._send(message, "write_back", answers.mapping)

    def evict(self, keys: Iterable[ExpertKey] | None = None, part: str | None = None) -> Ticket[Result]:
        """Writes back, then drops copies. Result: {evicted, skipped}; skipped keys are leased or in use."""
        wanted, only = None if keys is None else plain_keys(keys), None if part is None else self.schema.part(part).name
        message = messages.Evict(self._next_id(), self._handle, wanted, only)
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

        None: for a writer of a trainable schema the order of a training step over all layers (`micro_batches` forwards and
        backwards, then the update), else that of a ring. For other cycles see `paramstore.core.visits`; empty ones take
        the declaration back. A wrong order costs transfers, never a result. Raises ConfigError.
        """
        self._connection.check_minor(TRAINING_MINOR, "declare_schedule")
        whole_number("micro_batches", micro_batches, least=1)
        if param_visits is None and self.mode == "write" and self.schema.is_trainable:
            is_exact = self.schema.updates == "exact"
            param_visits = training_visits(self.layers, micro_batches=micro_batches, is_exact=is_exact)
            optim_visits = apply_visits(self.layers, is_exact=is_exact) if optim_visits is None else optim_visits
        elif param_visits is None:
            param_visits = ring_visits(self.layers)
        param = check_visits(param_visits, self.layers, what="param_visits")
        optim = check_visits(() if optim_visits is None else optim_visits, self.layers, what="optim_visits")
        message = messages.DeclareSchedule(self._next_id(), self._handle, param, optim)
        self._send(message, "declare_schedule", answers.nothing).wait()

    def residency(self) -> Result:
        """Where every expert is: {layers, experts, optim, param, heat, hbm}, lists in key order. hbm: what clients report."""
        return self._send(messages.Residency(self._next_id(), self._handle), "residency", answers.mapping).wait()

    def before_unmap(self, fn: BeforeUnmap) -> Callable[[], object]:
        """Has `fn(address, length_bytes)` called before memory that this session has leased is unmapped: whoever registered
        it (cudaHostRegister) must unregister it then.

        It is called once per segment of the connection, also of its other namespaces, from any thread, and must not raise;
        again for the same memory where an interrupt came. Returns the function that ends this.
        """
        return self._connection.segments.before_unmap(function("fn", fn))

    def report_device(
        self, *, resident: Iterable[ExpertKey], touched: Iterable[ExpertKey], bytes_resident: int
    ) -> None:
        """Tells the daemon what this process holds in HBM, and which keys it used there since the last report. One-way."""
        self._check_open()
        held, used = plain_keys(resident), plain_keys(touched)
        self.space.check((*held, *used), namespace=self.name)
        self._connection.post(messages.DeviceReport(self._handle, held, used, whole_number("bytes_resident", bytes_resident)))

    def _wish(self, keys: Iterable[ExpertKey], *, is_wanted: bool) -> None:
        message = messages.Protect(self._next_id(), self._handle, plain_keys(keys), is_wanted)
        self._send(message, "protect" if is_wanted else "unprotect", answers.nothing).wait()
