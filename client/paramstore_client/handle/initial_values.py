"""Sends initial values to the volumes: one key after the other, a few of them at once.

The caller's function runs while the daemon writes what it returned before; at most PUTS_IN_FLIGHT values are in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from paramstore.core.key import ExpertKey
from paramstore.core.schema import Schema
from paramstore.errors import CapacityError
from paramstore.wire.messages import InitializeEnd, InitializePut
from paramstore_client.connection import answers
from paramstore_client.connection.shared_socket import Connection
from paramstore_client.connection.ticket import Ticket
from paramstore_client.gradients.upload_area import Range, UploadArea

if TYPE_CHECKING:
    from torch import Tensor

InitialValue = Callable[[ExpertKey], Mapping[str, "Tensor"]]
"""(layer, expert) -> {field: tensor}"""

PUTS_IN_FLIGHT = 8
"""Most values on their way at once: enough to keep the volumes busy while the next one is made."""


def put_initial_values(
    connection: Connection, area: UploadArea, handle: int, *, schema: Schema, keys: Iterable[ExpertKey], fn: InitialValue,
    timeout_s: float, puts_of_others: int = 0,
) -> None:  # fmt: skip
    """Puts `fn(key)` for every one of `keys`, in their order, and returns when every record is whole on a volume. The caller
    has begun the initialization.

    keys: all keys of the namespace, or this rank's share. timeout_s: for the end, which ranks make together; it waits so long for
    each of the `puts_of_others` too.

    Raises what `fn` raises, SchemaMismatch, CapacityError or the daemon's error; the namespace then has no whole value
    and `initialize` may start over.
    """
    from paramstore_client import tensors

    fields = schema.initial_fields()
    flying: deque[Ticket[None]] = deque()
    try:
        for key in keys:
            values = fn(key)
            tensors.check_values(key, values, fields, schema=schema)
            place = free_place(area, schema.initial_bytes, flying, flying_max=PUTS_IN_FLIGHT)
            tensors.copy_into(values, fields, area.mapping(place.segment), place.offset_bytes)
            flying.append(send_value(connection, area, handle, key, place))
        while flying:
            flying.popleft().wait()
    finally:
        for ticket in flying:
            ticket.abandon()
    end = InitializeEnd(connection.next_id(), handle)
    connection.request(end, what="initialize, its end", convert=answers.nothing, timeout_s=timeout_s * (1 + puts_of_others)).wait()


def free_place(area: UploadArea, length_bytes: int, flying: deque[Ticket[None]], *, flying_max: int) -> Range:
    """A free range; waits for the oldest value under way where there are `flying_max`, or no room for more."""
    if len(flying) >= flying_max:
        flying.popleft().wait()
    while True:
        try:
            return area.take(1, length_bytes, most_bytes=flying_max * length_bytes)[0]
        except CapacityError:
            if not flying:
                raise
            flying.popleft().wait()


def send_value(
    connection: Connection, area: UploadArea, handle: int, key: ExpertKey, place: Range
) -> Ticket[None]:
    taken = {key: place}
    return connection.request(
        InitializePut(connection.next_id(), handle, key, place.segment, place.offset_bytes),
        what=f"initialize of key {key}",
        convert=answers.nothing,
        on_settled=lambda _: area.give_back_all(taken),
        is_cancellable=False,
    )
