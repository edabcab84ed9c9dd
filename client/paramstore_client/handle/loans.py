"""Lease slots of a handle beyond its promise: asked for by a message, and asked back by a word in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from paramstore.errors import ProtocolError
from paramstore.wire.messages import LOANS_MINOR, Borrow, GiveBack, Lent
from paramstore_client.connection.segments import Segments
from paramstore_client.connection.shared_socket import Connection
from paramstore_client.connection.ticket import Ticket
from paramstore_client.source import LeaseKeeper, Loan


class HandleLoans:
    """What the daemon lends a handle. The first of those who keep its leases may borrow, until it leaves or is gone: the loan is
    the handle's.

    leave: ends the keeping of who borrows here; it has given everything back before.
    """

    def __init__(
        self, connection: Connection, handle: int, *, name: str, is_reader: bool, leave: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._handle = handle
        self._name = name
        self.leave = leave
        self._may_borrow = is_reader and connection.minor >= LOANS_MINOR

    def begin_borrow(self, keeper: LeaseKeeper, count: int) -> Ticket[Loan] | None:
        """Asks for `count` slots in all, and returns at once. None where nothing can be lent to this keeper: to a writer, by a
        daemon before protocol 1.7, or while an earlier keeper has not left. Raises as `Connection.request`."""
        if not self._may_borrow or self._connection.segments.keepers(self._handle)[:1] != [keeper]:
            return None
        message = Borrow(self._connection.next_id(), self._handle, count)
        convert = partial(_loan_of, self._connection.segments)
        return self._connection.request(message, what=f"borrow on {self._name!r}", convert=convert, is_cancellable=False)

    def give_back(self, kept: int) -> None:
        """Gives all borrowed slots back but `kept`, whose leases were released before. Never blocks, never raises."""
        if self._may_borrow:
            self._connection.post(GiveBack(self._handle, kept))


def _loan_of(segments: Segments, answer: object) -> Loan:
    if not isinstance(answer, Lent):
        raise ProtocolError(f"a {type(answer).__name__} came where a Lent was due")
    return answer.count, segments.word(answer.word)
