"""Tickets are settled by the answers for them or by the connection's end, once, however often that is interrupted."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from paramstore.errors import CapacityError, LeaseError, ParamStoreError, ProtocolError, StoreUnavailable
from paramstore.wire import messages as m
from paramstore.wire.codec import encode
from paramstore_client.connection import open_tickets
from paramstore_client.connection.inbox import Inbox
from paramstore_client.connection.open_tickets import OpenTickets
from paramstore_client.connection.segments import Segments
from paramstore_client.connection.ticket import Ticket


class Desk:
    """Open tickets, the inbox that settles them, and the daemon's end of its socket."""

    def __init__(self) -> None:
        self.theirs, self.ours = socket.socketpair()
        self.ours.setblocking(False)
        self.inbox = Inbox(self.ours, Segments())
        self.tickets = OpenTickets()
        self.converted: list[object] = []
        self.settled: list[ParamStoreError | None] = []
        self.meanwhile: Callable[[], object] = bool
        """Called within each settling."""
        self.interrupts = 0
        """How many more times a settling is interrupted, right after the result was made."""

    def add(self, request_id: int) -> Ticket[Any]:
        """A ticket whose result counts how often it was made."""

        def convert(answer: object) -> int:
            self.converted.append(answer)
            return len(self.converted)

        def settled(error: ParamStoreError | None) -> None:
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            self.meanwhile()
            self.settled.append(error)

        ticket: Ticket[Any] = Ticket(
            self, request_id, what="call", convert=convert, timeout_s=1.0, on_settled=settled, is_cancellable=True  # type: ignore[arg-type]
        )
        self.tickets[request_id] = ticket
        return ticket

    def say(self, *answers: m.Message) -> None:
        self.theirs.sendall(b"".join(bytes(encode(answer)) for answer in answers))
        self.inbox.read()


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.inbox.close()
    desk.theirs.close()
    desk.ours.close()


def test_each_answer_settles_its_ticket(desk: Desk) -> None:
    first, second = desk.add(1), desk.add(2)
    desk.say(m.Failed(2, "LeaseError", "none is left"), m.Done(1, "a"))
    desk.tickets.settle_from(desk.inbox)
    assert first.wait() == 1
    with pytest.raises(LeaseError, match="none is left"):
        second.wait()
    assert desk.tickets == {}


def test_an_interrupted_settling_is_done_again_and_gives_one_result(desk: Desk) -> None:
    first, second = desk.add(1), desk.add(2)
    desk.say(m.Done(1, "a"), m.Done(2, "b"))
    desk.interrupts = 2
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            desk.tickets.settle_from(desk.inbox)
        assert desk.inbox.is_behind
    desk.tickets.settle_from(desk.inbox)
    assert [first.wait(), second.wait()] == [1, 2]
    assert desk.converted == [m.Done(1, "a"), m.Done(2, "b")]
    assert desk.settled == [None, None]
    assert not desk.inbox.is_behind


def test_an_answer_to_what_is_not_open_and_the_daemons_reason_end_the_connection(desk: Desk) -> None:
    desk.say(m.Done(7))
    with pytest.raises(ProtocolError, match="request 7, which is not open"):
        desk.tickets.settle_from(desk.inbox)
    desk.tickets[7] = desk.add(7)
    desk.say(m.Failed(0, "LeaseError", "go away"))
    with pytest.raises(LeaseError, match="go away"):
        desk.tickets.settle_from(desk.inbox)


def test_the_end_settles_all_and_changes_no_outcome(desk: Desk) -> None:
    first, second = desk.add(1), desk.add(2)
    desk.say(m.Done(1, "a"))
    desk.tickets.settle_from(desk.inbox)
    for _ in range(2):
        desk.tickets.fail(StoreUnavailable("the daemon went away"), is_ours=False, is_expected=True)
    assert first.wait() == 1
    with pytest.raises(StoreUnavailable, match="call: the daemon went away"):
        second.wait()
    assert [type(error) for error in desk.settled] == [type(None), StoreUnavailable]
    assert desk.tickets == {}


def test_one_thread_settles_a_ticket_where_another_closes_meanwhile(desk: Desk) -> None:
    ticket = desk.add(1)
    closer = threading.Thread(
        target=lambda: desk.tickets.fail(StoreUnavailable("closed"), is_ours=True, is_expected=True), daemon=True
    )

    def close_meanwhile() -> None:
        desk.meanwhile = bool
        closer.start()
        closer.join(0.05)

    desk.meanwhile = close_meanwhile
    desk.say(m.Done(1, "a"))
    desk.tickets.settle_from(desk.inbox)
    closer.join(5)
    assert desk.settled == [None]
    assert ticket.wait() == 1
    assert desk.tickets == {}


@pytest.mark.parametrize("place", ["convert", "on_settled"])
def test_a_foreign_error_is_its_tickets_where_it_comes_again(desk: Desk, place: str) -> None:
    wrong, right = desk.add(1), desk.add(2)
    released = list[int]()

    class Result:
        def release(self) -> None:
            released.append(1)

    def fails(answer: object) -> None:
        raise KeyError("a bug")

    if place == "convert":
        wrong._convert = fails
    else:
        wrong._convert, wrong._on_settled = lambda answer: Result(), fails
    desk.say(m.Done(1, "a"), m.Done(2, "b"))
    with pytest.raises(KeyError, match="a bug"):
        desk.tickets.settle_from(desk.inbox)
    assert not wrong.is_settled, "it may have been raised by a signal's handler"
    desk.tickets.settle_from(desk.inbox)
    with pytest.raises(KeyError, match="a bug"):
        wrong.wait()
    assert right.wait() == 1
    assert desk.tickets == {}
    assert released == ([] if place == "convert" else [1])


def test_errors_of_a_signals_handler_are_no_tickets(desk: Desk) -> None:
    ticket, calls = desk.add(1), count(1)

    def interrupted(answer: object) -> int:
        call = next(calls)
        if call == 1:
            raise TimeoutError
        if call == 2:
            raise TimeoutError
        return call

    ticket._convert = interrupted
    desk.say(m.Done(1, "a"))
    for _ in range(2):
        with pytest.raises(TimeoutError):
            desk.tickets.settle_from(desk.inbox)
    desk.tickets.settle_from(desk.inbox)
    assert ticket.wait() == 3


def test_there_is_a_most(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_tickets, "TICKETS_MAX", 1)
    desk.tickets.check_room("call")
    desk.add(1)
    with pytest.raises(CapacityError, match="call: 1 requests of this client are unanswered"):
        desk.tickets.check_room("call")
