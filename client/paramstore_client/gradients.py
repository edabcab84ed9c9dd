"""The pending gradients of one writing handle: which key's sum lies in which range of the upload area.

- A key's gradients are summed in its own range, in push order, in the gradient dtype: bitwise repeatable.
- All of a push or none of it: keys, shapes and dtypes are checked, memory is taken and the daemon has agreed to the new
  keys before the first sum changes.
- From `consume` on the ranges belong to the daemon, until the request that consumes them is answered. If that was refused they
  are pending again, here as in the daemon (`claims`). While an apply is open the daemon reads each key as soon as it was pushed,
  once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.schema import Schema
from paramstore.errors import CapacityError, ParamStoreError, ProtocolError, SchemaMismatch, StepOutOfOrder, WaitTimeout
from paramstore_client.claims import Claims, Consumer
from paramstore_client.ticket import Ticket
from paramstore_client.upload import Range, UploadArea

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

OnSettled = Callable[[ParamStoreError | None], None]
Announce = Callable[[list[tuple[int, int, int, int]], bool], None]
Gradients = Mapping[ExpertKey, Mapping[str, "Tensor"]]
"""key -> field -> gradient, every field of the schema."""


class PendingGradients:
    """Owner of the ranges that hold one handle's pending gradients."""

    def __init__(self, area: UploadArea, *, name: str, schema: Schema, space: KeySpace) -> None:
        self._area = area
        self._name = name
        self._schema = schema
        self._space = space
        self._pushing = threading.RLock()
        self._ranges: dict[ExpertKey, Range] = {}
        self._claims = Claims(area)
        self._before_push: list[Callable[[], object]] = []
        self._last: set[ExpertKey] | None = None
        """What was pushed since an apply was opened; None while none is."""
        self._opened: Ticket[Any] | None = None

    def __len__(self) -> int:
        with self._pushing:
            self._take_back()
            return len(self._ranges)

    def before_push(self, fn: Callable[[], object]) -> Callable[[], object]:
        """`fn()` is called first in every push; it may consume what is pending. Returns the function that ends this."""
        self._before_push.append(fn)
        return lambda: self._before_push.remove(fn) if fn in self._before_push else None

    @property
    def is_open(self) -> bool:
        """Whether an apply was opened, and not ended or given up since."""
        return self._last is not None

    def open(self, send: Callable[[], Ticket[Any]]) -> None:
        """From here on each push of a key is its last. send: makes the ticket of the request that opens the apply."""
        with self._pushing:
            self.check_closed("begin_apply")
            self._opened = send()
            self._last = set()

    def check_closed(self, call: str) -> None:
        """Raises StepOutOfOrder while an apply is open."""
        if self.is_open:
            raise StepOutOfOrder(f"{call} on {self._name!r}: an apply is open (begin_apply): call end_apply first")

    def check_open(self, call: str) -> None:
        """Raises what the open apply has met, StepOutOfOrder where none is open."""
        if self._opened is not None and self._opened.done() and self._opened.error is not None:
            opened, self._opened, self._last = self._opened, None, None
            assert opened.error is not None
            raise opened.error
        if not self.is_open:
            raise StepOutOfOrder(f"{call} on {self._name!r}: no apply is open: begin_apply opens one")

    def push(self, gradients: Gradients, announce: Announce) -> None:
        """Adds `gradients` to what is pending. announce: tells the daemon of keys that had none, or that an open apply may take
        (then its second argument is True), and returns when it agreed.

        Raises SchemaMismatch, UnknownKey, CapacityError, StepOutOfOrder or what `announce` raises; then nothing has changed, but
        the sums of keys that had a gradient, where an apply is open and `announce` raised.
        """
        for fn in tuple(self._before_push):
            fn()
        fields = self._check(gradients)
        with self._pushing:
            self._take_back()
            self._check_first(gradients)
            new_keys = [key for key in gradients if key not in self._ranges]
            try:
                self._add(gradients, new_keys, fields, announce)
            except ProtocolError:
                if self._last is not None:
                    raise  # some sums have grown already
                # What a request before this push would have consumed may be pending in the daemon: it was refused, which
                # we had not read yet.
                for ticket in self._claims.under_way():
                    ticket.settled_within(ticket.timeout_s)
                self._take_back()
                still_new = [key for key in new_keys if key not in self._ranges]
                if still_new == new_keys:
                    raise
                self._add(gradients, still_new, fields, announce)

    def _add(self, gradients: Gradients, new_keys: list[ExpertKey], fields: tuple[Any, ...], announce: Announce) -> None:
        """Sums all of `gradients`, in new ranges for `new_keys`, or changes nothing."""
        from paramstore_client import tensors

        new_ranges = self._take(len(new_keys))
        try:
            for key, place in zip(new_keys, new_ranges, strict=True):
                tensors.copy_into(gradients[key], fields, self._area.mapping(place.segment), place.offset_bytes)
            told = list(zip(new_keys, new_ranges, strict=True))
            if self._last is not None:  # the daemon may read all of these as soon as it knows
                told += self._add_to_old(gradients, fields)
            if told:
                announce([(*key, place.segment, place.offset_bytes) for key, place in told], self._last is not None)
        except WaitTimeout:
            # The daemon may still take the message, and then it owns the ranges: they are not used again. The same
            # holds when an interrupt ends the wait, which is why only `Exception` gives them back.
            raise
        except Exception:
            self._area.give_back(new_ranges)
            if self._last is not None:
                self.check_open("push")  # what it met says more
            raise
        if self._last is None:
            self._add_to_old(gradients, fields)
        else:
            self._last.update(gradients)
        self._ranges.update(zip(new_keys, new_ranges, strict=True))

    def _add_to_old(self, gradients: Gradients, fields: tuple[Any, ...]) -> list[tuple[ExpertKey, Range]]:
        """Adds the gradients of keys that have one; gives where they lie."""
        from paramstore_client import tensors

        places = [(key, self._ranges[key]) for key in gradients if key in self._ranges]
        for key, place in places:
            tensors.add_into(gradients[key], fields, self._area.mapping(place.segment), place.offset_bytes)
        return places

    def _check_first(self, keys: Iterable[ExpertKey]) -> None:
        for key in keys if self._last else ():
            if self._last is not None and key in self._last:
                raise StepOutOfOrder(
                    f"push on {self._name!r}: {key} was pushed already since begin_apply, and its update may have begun; push what "
                    "comes before the last gradient of a key before begin_apply"
                )

    def consume(self, request: Consumer, send: Callable[[OnSettled], Ticket[T]]) -> Ticket[T]:
        """Hands everything pending to `request`, which `send` sends: its ranges are free once it has taken effect, and pending
        again if it is refused.

        send: given what must run when the request settles; makes its ticket. If nothing was sent, all stays pending; after a
        WaitTimeout or an interrupt the daemon may take it, so nothing does.
        """
        with self._pushing:
            self._take_back()
            claim = self._claims.add(request, self._ranges)
            self._ranges = {}
            opened, last, self._opened, self._last = self._opened, self._last, None, None
            try:
                claim.ticket = send(partial(self._claims.settle, claim))
            except WaitTimeout:
                raise  # the request is on its way: what it consumes is pending here no more
            except Exception:
                self._claims.withdraw(claim)
                self._ranges, self._opened, self._last = dict(claim.ranges), opened, last
                raise
            if opened is not None:
                opened.abandon()  # the outcome is that of `request`
            return claim.ticket

    def _take_back(self) -> None:
        """What refused requests have left is pending again. Only with `_pushing` held."""
        self._ranges.update(self._claims.take_left())

    def _check(self, gradients: Gradients) -> tuple[Any, ...]:
        from paramstore_client import tensors

        if not self._schema.is_trainable:
            raise SchemaMismatch(f"namespace {self._name!r} has no gradients: its schema is {self._schema.kind!r}")
        fields = self._schema.gradient_fields()
        self._space.check(gradients, namespace=self._name)
        for key, values in gradients.items():
            tensors.check_values(key, values, fields, schema=self._schema)
        return fields

    def _take(self, count: int) -> list[Range]:
        """Ranges for `count` keys. Where there is no room, waits for the applies under way, which give theirs back."""
        if count == 0:
            return []
        length_bytes = self._schema.gradient_bytes
        most_bytes = len(self._space) * length_bytes
        while True:
            under_way = self._claims.under_way()
            try:
                return self._area.take(count, length_bytes, most_bytes=most_bytes)
            except CapacityError:
                if not under_way or not under_way[0].settled_within(under_way[0].timeout_s):
                    raise
                self._take_back()
