"""Borrowing through a handle: who may, what is asked, and what the daemon's word says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import paramstore_client as ps
from paramstore.wire import messages as m
from paramstore_testkit.wire.fake_daemon import FakeDaemon


class Keeper:
    """Keeps nothing."""

    def give_back(self) -> None: ...

    def let_go(self) -> None: ...


@pytest.fixture
def reader(store: ps.Store, namespace: ps.Namespace) -> ps.Namespace:
    namespace.commit(1).wait()
    return store.open_namespace("moe")


def ticket_of(lender: Any, keeper: Keeper, count: int) -> Any:
    ticket = lender.begin_borrow(keeper, count)
    assert ticket is not None
    return ticket


def test_a_reader_borrows_and_sees_in_its_word_what_it_may_keep(daemon: FakeDaemon, store: ps.Store, reader: ps.Namespace) -> None:
    keeper, loans = Keeper(), daemon.sessions[0].loans
    lender = reader.let_stand(keeper)
    assert lender is not None
    loans.to_lend = 5
    count, word = ticket_of(lender, keeper, 9).wait()
    assert (count, word[0], daemon.requests(m.Borrow)[0].count) == (5, 5, 9)
    loans.to_lend = 7
    assert ticket_of(lender, keeper, 9).wait()[0] == 7
    loans.recall(reader._handle, 2)
    assert word[0] == 2
    lender.give_back(2)
    reader.steps()
    assert daemon.requests(m.GiveBack) == [m.GiveBack(reader._handle, 2)]
    store.close()
    assert word[0] == 2, "the page outlives the store for who reads it"
    lender.give_back(0)


def test_only_the_first_who_keeps_leases_borrows_while_it_lives(reader: ps.Namespace) -> None:
    first, second = Keeper(), Keeper()
    lenders = [reader.let_stand(keeper) for keeper in (first, second)]
    assert all(lenders)
    assert ticket_of(lenders[0], first, 3).wait()[0] == 0
    assert lenders[1].begin_borrow(second, 3) is None  # type: ignore[union-attr]
    del first
    assert ticket_of(lenders[1], second, 3).wait()[0] == 0


def test_who_has_left_lets_the_next_one_borrow_though_it_lives(reader: ps.Namespace) -> None:
    first, second = Keeper(), Keeper()
    lenders: list[Any] = [reader.let_stand(keeper) for keeper in (first, second)]
    for _ in range(2):
        lenders[0].leave()
    assert lenders[0].begin_borrow(first, 3) is None
    assert ticket_of(lenders[1], second, 3).wait()[0] == 0


@pytest.mark.parametrize("why", ["writer", "older daemon"])
def test_who_can_be_lent_nothing_asks_nobody(daemon: FakeDaemon, reader: ps.Namespace, namespace: ps.Namespace, why: str) -> None:
    keeper, handle = Keeper(), reader
    if why == "writer":
        handle = namespace
    else:
        reader._connection.minor = m.LOANS_MINOR - 1
    lender = handle.let_stand(keeper)
    assert lender is not None, "leases may stand all the same"
    assert lender.begin_borrow(keeper, 5) is None
    lender.give_back(0)
    handle.steps()
    assert (daemon.requests(m.Borrow), daemon.requests(m.GiveBack)) == ([], [])


def lie(change: Callable[[m.Lent], m.Message], daemon: FakeDaemon) -> None:
    """Has the next answer to a Borrow changed."""

    def answer(session: Any, request: Any) -> None:
        lent, fds = session.loans.lend(request)
        session.send(change(lent), fds)

    daemon.script(m.Borrow, answer)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda lent: m.Done(lent.id, None), "descriptors came|a Done came"),
        (lambda lent: m.Lent(lent.id, 1, 1 << 20, lent.page_bytes), "word 1048576 of a page of 1024"),
        (lambda lent: m.Lent(lent.id, 1, 0, 8192), "memfd of 4096 bytes"),
        (lambda lent: m.Lent(lent.id, 1, 0, 0), "no page of words was sent"),
    ],
)
def test_an_answer_that_makes_no_sense_lends_nothing(daemon: FakeDaemon, reader: ps.Namespace, change: Any, told: str) -> None:
    keeper = Keeper()
    lender = reader.let_stand(keeper)
    lie(change, daemon)
    with pytest.raises(ps.ProtocolError, match=told):
        ticket_of(lender, keeper, 3).wait()


def test_a_word_without_a_page_and_a_second_page_are_refused(daemon: FakeDaemon, reader: ps.Namespace) -> None:
    keeper = Keeper()
    lender = reader.let_stand(keeper)
    daemon.script(m.Borrow, lambda session, request: session.send(m.Lent(request.id, 1, 0, 0)))
    with pytest.raises(ps.ProtocolError, match="word 0 was named, and no page"):
        ticket_of(lender, keeper, 3).wait()

    def twice(session: Any, request: Any) -> None:
        lent, fds = session.loans.lend(request)
        session.send(lent, fds)
        session.send(m.Lent(request.id, 1, 0, lent.page_bytes), fds)

    daemon.script(m.Borrow, twice)
    ticket_of(lender, keeper, 3).wait()
    with pytest.raises(ps.ProtocolError, match="a second page"):
        reader.steps()
