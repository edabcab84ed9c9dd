"""A handle on a namespace: the state that all of its calls share. They are sent in its name, and refused once it is closed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from operator import index
from typing import Any, TypeVar

import msgspec

from paramstore.core.arguments import counts, data, listed, whole_number, wrong
from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.schema import Schema
from paramstore.errors import CapacityError, ParamStoreError, SchemaMismatch, UnknownNamespace
from paramstore.wire.messages import BOUND_MINOR, EXTRA_BYTES_MAX, KEYS_MAX, PROMISE_MINOR, Request
from paramstore_client.connection.answers import Opened
from paramstore_client.connection.shared_socket import Connection
from paramstore_client.connection.ticket import Ticket
from paramstore_client.gradients.consumed_ranges import Consumer
from paramstore_client.gradients.pending import PendingGradients
from paramstore_client.gradients.upload_area import UploadArea
from paramstore_client.handle.ranks import ALONE, Rank

T = TypeVar("T")

KEYS_EXPECTED = "(layer, expert) pairs of whole numbers"
ANSWER_GRACE_S = 1.0
"""Extra wait for the answer after a deadline that the daemon keeps itself: the answer says who was in the way."""


class Handle:
    """The base of the parts of `Namespace`. Owner of the pending gradients and of what is known of the chain of commits."""

    def __init__(
        self, connection: Connection, area: UploadArea, opened: Opened, *, mode: str, is_debug: bool, ours: Rank = ALONE
    ) -> None:
        self.name = opened.name
        self._ours = ours
        self.mode = mode
        self.schema = Schema.from_description(opened.schema)
        self.space = KeySpace.of(opened.layers, opened.experts)
        self.wait_timeout_s = opened.wait_timeout_s
        self._committed_step = opened.committed_step
        self._epoch = opened.epoch
        self._handle = opened.handle
        self._connection = connection
        self._area = area
        self._is_debug = is_debug
        self._is_closed = False
        self._applies = 0
        self._committed_applies = 0
        self._view_changes = itertools.count(1)
        self._view_change_count = 0
        self._pending = PendingGradients(
            area, name=self.name, schema=self.schema, space=self.space, share_bytes=opened.gradient_share_bytes,
            clock=connection.clock,
        )  # fmt: skip

    @property
    def rank(self) -> int:
        """Index of this process among the `world_size` that write together; 0 where it writes alone."""
        return self._ours.rank

    @property
    def world_size(self) -> int:
        """How many processes write together: with more than one, calls that change records are collective."""
        return self._ours.world_size

    @property
    def layers(self) -> tuple[int, ...]:
        """The indices of the layers that have experts, ascending."""
        return self.space.layers

    def keys(self) -> list[ExpertKey]:
        """All expert keys, in key order."""
        return list(self.space)

    @property
    def _limit_s(self) -> float:
        """Wait for an answer; with several ranks a little longer than the daemon's own, as its answer says who is missing."""
        return self.wait_timeout_s + (ANSWER_GRACE_S if self._ours.world_size > 1 else 0.0)

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
        """Sends a request that consumes what is pending, unless it is refused. It cannot be cancelled."""
        return self._pending.consume(message, lambda end: self._send(message, call, convert, on_settled=end, is_cancellable=False))

    def _count_view_change(self) -> None:
        """Counts a change of view. To be called after its request has gone out: a lease at the old count may be of either view.

        With two threads at once the smaller number may stay; no number is drawn twice, so none stands for two views.
        """
        self._view_change_count = next(self._view_changes)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UnknownNamespace(f"this handle of {self.name!r} was closed; open the namespace again")

    def _check_writes(self, call: str) -> None:
        """Raises SchemaMismatch on a reader's handle; in the call itself, as nobody may wait for its ticket."""
        if self.mode != "write":
            raise SchemaMismatch(f"{call}: namespace {self.name!r} is open for reading: open it with mode='write'")


def lease_bounds(connection: Connection, call: str, least: object, most: object) -> tuple[int, int | None]:
    """The least and the most lease slots that `call` is to ask for; most is None for no bound, and where the daemon knows none.
    Raises ConfigError, and VersionMismatch from a daemon that promises nothing."""
    least_slots = whole_number("min_lease_slots", least)
    most_slots = None if most is None else whole_number("max_lease_slots", most)
    if least_slots:
        connection.check_minor(PROMISE_MINOR, f"{call}(min_lease_slots=...)")
    if most_slots is not None and most_slots < least_slots:
        raise wrong("max_lease_slots", most, f"a number that is not below min_lease_slots={least_slots}")
    return least_slots, None if connection.minor < BOUND_MINOR else most_slots


def plain_keys(keys: Iterable[ExpertKey]) -> list[ExpertKey]:
    """`keys` as plain tuples of plain integers, whatever types of integers the caller uses."""
    given = keys if type(keys) is list else listed("keys", keys, KEYS_EXPECTED)
    try:
        wanted = msgspec.convert(given, list[ExpertKey])  # takes plain integers alone; faster than a look at each
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter where the text that the former quotes cannot be encoded
        wanted = _plain_pairs(given)
    if len(wanted) > KEYS_MAX:
        raise CapacityError(f"{len(wanted)} keys in one call; the limit is {KEYS_MAX}: ask in parts")
    return wanted


def _plain_pairs(keys: list[Any]) -> list[ExpertKey]:
    """`keys`, pairs of integers of any types, as plain keys. Raises ConfigError."""
    cause = None
    try:
        if all(counts(kind) for kind in {type(number) for key in keys for number in key}):
            return [(index(layer), index(expert)) for layer, expert in keys]
    except Exception as error:  # noqa: BLE001 - whatever foreign types raise when they are unpacked or counted, they are no keys
        cause = error
    raise wrong("keys", keys, KEYS_EXPECTED) from cause


def plain_extra(extra: bytes) -> bytes:
    """`extra` as plain bytes, which are kept with a step. Raises ConfigError, CapacityError."""
    plain = data("extra", extra)
    if len(plain) > EXTRA_BYTES_MAX:
        raise CapacityError(f"extra has {len(plain)} bytes, the limit is {EXTRA_BYTES_MAX}")
    return plain
