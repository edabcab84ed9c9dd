"""The tickets of one connection that are not settled yet, and what settles them: an answer, or the connection's end.

- One thread at a time settles, so that a ticket has one outcome where the daemon answers while another thread closes.
- A settling that was interrupted is done again, to the same end: a ticket is in here until it is settled.
"""

from __future__ import annotations

import threading
from typing import Any

from paramstore.errors import CapacityError, ParamStoreError, ProtocolError
from paramstore_client.connection.inbox import Inbox
from paramstore_client.connection.ticket import Ticket

TICKETS_MAX = 1 << 16
"""Most unanswered requests of one connection; only a caller that never waits has more."""
CONNECTION_ID = 0
"""Id of errors that concern the connection as a whole; no request has it."""


class OpenTickets(dict[int, Ticket[Any]]):
    """Unsettled tickets by the id of their request."""

    def __init__(self) -> None:
        super().__init__()
        self._settling = threading.RLock()
        """Reentrant, as a signal's handler may close the store while its thread settles."""

    def check_room(self, what: str) -> None:
        """Raises CapacityError where no request more may be unanswered."""
        if len(self) >= TICKETS_MAX:
            raise CapacityError(f"{what}: {TICKETS_MAX} requests of this client are unanswered; wait for some of them")

    def settle_from(self, inbox: Inbox) -> None:
        """Settles what the answers in `inbox` are for. Raises what ends the connection: the daemon's reason, ProtocolError,
        StoreUnavailable."""
        while (first := inbox.first()) is not None:
            request_id, answer = first
            if request_id == CONNECTION_ID and isinstance(answer, ParamStoreError):
                raise answer  # why the daemon hangs up: every ticket ends with it
            with self._settling:
                ticket = self.get(request_id)
                if ticket is None:
                    raise ProtocolError(f"{type(answer).__name__} answers request {request_id}, which is not open")
                if isinstance(answer, ParamStoreError):
                    ticket.settle_error(answer)
                else:
                    ticket.settle(answer)
                inbox.note_handled(self.pop, request_id)

    def fail(self, error: ParamStoreError, *, is_ours: bool, is_expected: bool) -> None:
        """Settles all of them with an error of `error`'s class. is_ours: this process ends the session; then those that can be
        cancelled fail as expected, as all do where `is_expected`."""
        for request_id, ticket in list(self.items()):
            is_quiet = is_expected or (is_ours and ticket.is_cancellable)
            with self._settling:
                ticket.settle_error(type(error)(f"{ticket.what}: {error}"), is_expected=is_quiet)
                self.pop(request_id, None)
