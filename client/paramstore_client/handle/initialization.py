"""An initialization over several attempts: it puts values key by key, makes them durable now and then, and can be resumed.

What `save` has made durable survives this process and the daemon; nobody can open or commit the namespace before every key has
its value. `Namespace.initialize` is the same in one call, for values that are quickly made again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from paramstore.core.arguments import seconds, whole_number
from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.schema import Schema
from paramstore.errors import UnknownKey
from paramstore.wire.messages import HEAT_MINOR, TRAINING_MINOR, InitializeBegin, InitializeEnd, InitializeSave
from paramstore_client.connection import answers
from paramstore_client.connection.answers import Result
from paramstore_client.connection.shared_socket import Connection
from paramstore_client.connection.ticket import Ticket
from paramstore_client.gradients.upload_area import UploadArea
from paramstore_client.handle.base import plain_extra, plain_keys
from paramstore_client.handle.initial_values import free_place, send_value

if TYPE_CHECKING:
    from torch import Tensor


class Begun(msgspec.Struct, frozen=True):
    """The result of InitializeBegin, from minor 3 on."""

    present: bytes
    extra: bytes | None


class Initialization:
    """An initialization under way, from `Namespace.begin_initialize`. Owner of the values under way. A context manager: its end
    gives those up.

    is_resumed: values that an earlier attempt made durable stay. values_in_flight: the most in memory at once. heat: packed.
    timeout_s: for the begin and the end, which ranks make together; the end waits so long for each of the `puts_of_others` too.
    """

    def __init__(
        self, connection: Connection, area: UploadArea, handle: int, *, schema: Schema, space: KeySpace, is_resumed: bool,
        values_in_flight: int, timeout_s: float, puts_of_others: int, heat: bytes,
    ) -> None:  # fmt: skip
        connection.check_minor(HEAT_MINOR if heat else TRAINING_MINOR, "heat" if heat else "begin_initialize")
        self._connection = connection
        self._area = area
        self._handle = handle
        self._schema = schema
        self._values_in_flight = values_in_flight
        self._end_timeout_s = timeout_s * (1 + puts_of_others)
        self._flying: deque[Ticket[None]] = deque()
        begin = InitializeBegin(connection.next_id(), handle, is_resumed, heat)
        begun = connection.request(
            begin, what="initialize", convert=lambda answer: answers.result_of(answer, Begun), timeout_s=timeout_s
        ).wait()
        present = int.from_bytes(begun.present, "little")
        self._missing = {key: None for number, key in enumerate(space) if not present >> number & 1}
        self.extra = begun.extra
        """Bytes that the attempt before this one gave to its last `save`; None if nothing of it was saved."""

    @property
    def missing(self) -> list[ExpertKey]:
        """The keys that have no value yet, in key order."""
        return list(self._missing)

    def put(self, key: ExpertKey, values: Mapping[str, Tensor]) -> None:
        """Gives `key` its value: {field: tensor}, in fp32 or the param dtype. The tensors are copied before this returns, and
        taken by the daemon some time later: a later call raises an error of that. Raises UnknownKey for a key that has one,
        SchemaMismatch."""
        from paramstore_client import tensors

        (key,) = plain_keys([key])
        if key not in self._missing:
            raise UnknownKey(f"key {key} has its value already, or is not in the namespace")
        fields = self._schema.initial_fields()
        tensors.check_values(key, values, fields, schema=self._schema)
        place = free_place(self._area, self._schema.initial_bytes, self._flying, flying_max=self._values_in_flight)
        tensors.copy_into(values, fields, self._area.mapping(place.segment), place.offset_bytes)
        self._flying.append(send_value(self._connection, self._area, self._handle, key, place))
        del self._missing[key]

    def settle(self, left: int = 0, *, timeout_s: float | None = None) -> None:
        """Returns when at most `left` of the values put so far are still under way. timeout_s: for each of them. Raises
        their errors."""
        whole_number("left", left)
        timeout_s = None if timeout_s is None else seconds("timeout_s", timeout_s)
        while len(self._flying) > left:
            self._flying.popleft().wait(timeout_s)

    def save(self, extra: bytes = b"") -> Ticket[Result]:
        """Makes the values that the daemon has taken durable for an attempt that resumes. extra: up to 64 KiB for that attempt,
        from which it can tell, for example, where the values came from. Result: {records, bytes_written, seconds}. Cannot be
        cancelled."""
        message = InitializeSave(self._connection.next_id(), self._handle, plain_extra(extra))
        return self._connection.request(message, what="save of an initialization", convert=answers.mapping, is_cancellable=False)

    def end(self) -> None:
        """Returns when every key has a whole record on a volume: then the namespace can be committed.

        Raises StepFailed naming a key that has no value.
        """
        self.settle()
        message = InitializeEnd(self._connection.next_id(), self._handle)
        self._connection.request(message, what="initialize, its end", convert=answers.nothing, timeout_s=self._end_timeout_s).wait()

    def __enter__(self) -> Initialization:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._flying:
            self._flying.popleft().abandon()
