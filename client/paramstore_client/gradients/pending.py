"""The pending gradients of one writing handle: which key's sum lies in which range of the upload area.

- A key's gradients are summed in its own range, in push order, in the gradient dtype: bitwise repeatable.
- A push takes effect as a whole or not at all: keys, shapes and dtypes are checked, memory is taken and the daemon has agreed to
  the new keys before the first sum changes.
- From `consume` on the ranges belong to the daemon, until the request that consumes them is answered. If that was refused they
  are pending again, here as in the daemon (`consumed_ranges`).
- While an apply is open the daemon reads each key as soon as all ranks have pushed it, once. Ranges that it has read are used again
  before the area grows; where it cannot grow, a push waits for some (decision 28).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from paramstore.clock import Clock
from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.schema import PAGE_BYTES, Schema, round_up
from paramstore.errors import CapacityError, ParamStoreError, ProtocolError, SchemaMismatch, StepOutOfOrder, WaitTimeout
from paramstore_client.connection.ticket import Ticket
from paramstore_client.gradients.consumed_ranges import ConsumedRanges, Consumer
from paramstore_client.gradients.upload_area import Range, UploadArea

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

ROOM_LAYERS = 2
"""Layers whose gradients a rank must have room for before a push may wait: one that is filled, one that waits for the others."""
LEAST_WAIT_S = 0.001
"""Shortest wait asked of the daemon: asked for 0 s it would not raise the error that says what the push waits for."""
OnSettled = Callable[[ParamStoreError | None], None]
Announce = Callable[[list[tuple[int, int, int, int]], bool], None]
Gradients = Mapping[ExpertKey, Mapping[str, "Tensor"]]
"""key -> field -> gradient, every field of the schema."""
AwaitRoom = Callable[[list[ExpertKey], float], list[ExpertKey]]
"""(keys, timeout_s) -> those of them that the open apply has read, as soon as there are some; 0: at once. Raises WaitTimeout."""


@dataclass(slots=True)
class _OpenApply:
    """An apply that was opened, and not ended or given up since. await_room: None where the daemon cannot tell what it has read."""

    ticket: Ticket[Any]
    await_room: AwaitRoom | None
    last: set[ExpertKey] = field(default_factory=set)
    """Keys that were pushed since it was opened."""


class PendingGradients:
    """Owner of the ranges that hold one handle's pending gradients."""

    def __init__(
        self, area: UploadArea, *, name: str, schema: Schema, space: KeySpace, share_bytes: int | None, clock: Clock
    ) -> None:
        """share_bytes: the size to which the area may grow while an apply is open; None: the daemon alone sets a limit."""
        self._area = area
        self._clock = clock
        self._name = name
        self._schema = schema
        self._space = space
        self.share_bytes = share_bytes
        self._range_bytes = round_up(schema.gradient_bytes, PAGE_BYTES) if schema.is_trainable else 0
        self._pushing = threading.RLock()
        self._ranges: dict[ExpertKey, Range] = {}
        self._claims = ConsumedRanges(area)
        self._before_push: list[Callable[[], object]] = []
        self._open: _OpenApply | None = None

    def __len__(self) -> int:
        with self._pushing:
            self._take_back()
            return len(self._ranges if self._open is None else self._ranges.keys() | self._open.last)

    @property
    def room_bytes(self) -> int:
        """Bytes of upload memory for the gradients of ROOM_LAYERS layers, or of all layers where there are fewer."""
        return min(ROOM_LAYERS, len(self._space.layers)) * self._space.experts * self._range_bytes

    def reserve_room(self) -> None:
        """Reserves `room_bytes` of the area for this handle, some of which it may use already, beside what other handles of the
        connection have reserved. Raises CapacityError, SchemaMismatch."""
        self._check_trainable()
        count = max(0, self.room_bytes // self._range_bytes - len(self._ranges))
        self._area.give_back(self._take_of_area(count, most_bytes=self.room_bytes, limit_bytes=self.share_bytes))
        if self not in self._area.tenants:
            self._area.tenants.append(self)

    @property
    def unused_room_bytes(self) -> int:
        """Bytes of the reserved room that are not taken."""
        return max(0, self.room_bytes - len(self._ranges) * self._range_bytes)

    def end(self) -> None:
        """Ends the reservation, as nothing is pushed any more: others may take the room."""
        if self in self._area.tenants:
            self._area.tenants.remove(self)

    def before_push(self, fn: Callable[[], object]) -> Callable[[], object]:
        """Has `fn()` called first in every push; it may consume what is pending. Returns the function that ends this."""
        self._before_push.append(fn)
        return lambda: self._before_push.remove(fn) if fn in self._before_push else None

    @property
    def is_open(self) -> bool:
        """Whether an apply was opened, and not ended or given up since."""
        return self._open is not None

    def open(self, send: Callable[[], Ticket[Any]], await_room: AwaitRoom | None) -> None:
        """Opens an apply: from here on each push of a key is its last. send: sends the request for it and returns its ticket."""
        with self._pushing:
            self.check_closed("begin_apply")
            self._open = _OpenApply(send(), await_room)

    def check_closed(self, call: str) -> None:
        """Raises StepOutOfOrder while an apply is open."""
        if self.is_open:
            raise StepOutOfOrder(f"{call} on {self._name!r}: an apply is open (begin_apply): call end_apply first")

    def check_open(self, call: str) -> None:
        """Raises the error that the open apply has met, or StepOutOfOrder where none is open."""
        opened = self._open
        if opened is not None and opened.ticket.done() and opened.ticket.error is not None:
            self._open = None
            raise opened.ticket.error
        if opened is None:
            raise StepOutOfOrder(f"{call} on {self._name!r}: no apply is open: begin_apply opens one")

    def push(self, gradients: Gradients, announce: Announce) -> None:
        """Adds `gradients` to what is pending. announce: tells the daemon of keys that had none, or that an open apply may take
        (then its second argument is True), and returns when it agreed.

        Raises SchemaMismatch, UnknownKey, CapacityError, StepOutOfOrder or what `announce` raises; then nothing has changed, except
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
                if self._open is not None:
                    raise  # some sums have grown already
                # A request before this push may have been refused, and its answer not read yet: then what it should have
                # consumed is still pending in the daemon.
                for ticket in self._claims.under_way():
                    ticket.settled_within()
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
            if self._open is not None:  # the daemon may read all of these as soon as it knows
                told += self._add_to_old(gradients, fields)
            if told:
                announce([(*key, place.segment, place.offset_bytes) for key, place in told], self._open is not None)
        except WaitTimeout:
            # The daemon may still take the message, and then it owns the ranges: they are not used again. The same
            # holds when an interrupt ends the wait, which is why only `Exception` gives them back.
            raise
        except Exception:
            self._area.give_back(new_ranges)
            if self._open is not None:
                self.check_open("push")  # the error that the apply has met says more
            raise
        if self._open is None:
            self._add_to_old(gradients, fields)
        else:
            self._open.last.update(gradients)
        self._ranges.update(zip(new_keys, new_ranges, strict=True))

    def _add_to_old(self, gradients: Gradients, fields: tuple[Any, ...]) -> list[tuple[ExpertKey, Range]]:
        """Adds the gradients of keys that have a sum already; returns these keys and where their sums lie."""
        from paramstore_client import tensors

        places = [(key, self._ranges[key]) for key in gradients if key in self._ranges]
        for key, place in places:
            tensors.add_into(gradients[key], fields, self._area.mapping(place.segment), place.offset_bytes)
        return places

    def _check_first(self, keys: Iterable[ExpertKey]) -> None:
        for key in keys if self._open is not None else ():
            if self._open is not None and key in self._open.last:
                raise StepOutOfOrder(
                    f"push on {self._name!r}: {key} was pushed already since begin_apply, and its update may have begun; push what "
                    "comes before the last gradient of a key before begin_apply"
                )

    def consume(self, request: Consumer, send: Callable[[OnSettled], Ticket[T]]) -> Ticket[T]:
        """Hands everything pending to `request`, which `send` sends: its ranges are free once it has taken effect, and pending
        again if it is refused.

        send: sends the request and returns its ticket; it is given the function to call when the request settles. If nothing was
        sent, all stays pending; after a WaitTimeout or an interrupt nothing does, as the daemon may take the request.
        """
        with self._pushing:
            self._take_back()
            claim = self._claims.add(request, self._ranges)
            self._ranges = {}
            opened, self._open = self._open, None
            try:
                claim.ticket = send(partial(self._claims.settle, claim))
            except WaitTimeout:
                raise  # the request is on its way: what it consumes is pending here no more
            except Exception:
                self._claims.withdraw(claim)
                self._ranges, self._open = dict(claim.ranges), opened
                raise
            if opened is not None:
                opened.ticket.abandon()  # the outcome is that of `request`
            return claim.ticket

    def _take_back(self) -> None:
        """Makes pending again what refused requests have left. Only with `_pushing` held."""
        self._ranges.update(self._claims.take_left())

    def _check(self, gradients: Gradients) -> tuple[Any, ...]:
        from paramstore_client import tensors

        self._check_trainable()
        fields = self._schema.gradient_fields()
        self._space.check(gradients, namespace=self._name)
        for key, values in gradients.items():
            tensors.check_values(key, values, fields, schema=self._schema)
        return fields

    def _check_trainable(self) -> None:
        if not self._schema.is_trainable:
            raise SchemaMismatch(f"namespace {self._name!r} has no gradients: its schema is {self._schema.kind!r}")

    def _take(self, count: int) -> list[Range]:
        """Ranges for `count` keys. Where there is no room, waits for the applies under way, which give theirs back."""
        deadline_s = None
        while count:
            under_way = self._claims.under_way()
            try:
                return self._take_now(count)
            except CapacityError:
                if under_way and under_way[0].settled_within():
                    self._take_back()
                    continue
                if under_way or self._open is None or not self._has_room():
                    raise
                if deadline_s is None:
                    deadline_s = self._clock.now_s() + self._open.ticket.timeout_s
                if not self._take_read(max(LEAST_WAIT_S, deadline_s - self._clock.now_s())):
                    raise
        return []

    def _take_now(self, count: int) -> list[Range]:
        """Takes `count` ranges from the area without waiting; while an apply is open, within this rank's share,
        and those that the apply has read before the area grows."""
        take = partial(self._take_of_area, count)
        if self._open is None:
            return take(most_bytes=len(self._space) * self._range_bytes)
        is_read = True
        while is_read:
            try:
                return take(most_bytes=0, limit_bytes=0)
            except CapacityError:
                is_read = self._take_read(0.0)
        return take(most_bytes=self._area.size_bytes + self.room_bytes // ROOM_LAYERS, limit_bytes=self.share_bytes)

    def _take_of_area(self, count: int, *, most_bytes: int, limit_bytes: int | None = None) -> list[Range]:
        return self._area.take(count, self._range_bytes, most_bytes=most_bytes, limit_bytes=limit_bytes, by=self)

    def _take_read(self, timeout_s: float) -> bool:
        """Frees the ranges that the open apply has read, waiting up to `timeout_s` for the first. Whether there were any."""
        opened = self._open
        waiting = [] if opened is None else [key for key in opened.last if key in self._ranges]
        if opened is None or opened.await_room is None or not waiting:
            return False
        read = set(opened.await_room(waiting, timeout_s)).intersection(waiting)
        self._area.give_back(self._ranges.pop(key) for key in read)
        return bool(read)

    def _has_room(self) -> bool:
        """Whether a push may wait: with less than `room_bytes` beside what was pushed before the apply was opened, ranks could
        wait for each other."""
        opened = self._open
        held_count = 0 if opened is None else len(self._ranges.keys() - opened.last)
        return opened is not None and self._area.size_bytes - held_count * self._range_bytes >= self.room_bytes
