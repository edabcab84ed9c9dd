"""A session's borrowed slots: what is lent and told, which word is whose, and what is asked back for whoever opens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paramstore.daemon import session_loans
from paramstore.errors import CapacityError, LeaseError
from paramstore.memory.shared import Mapping
from paramstore.memory.words import PAGE_BYTES, word_of
from paramstore.wire import messages as m

AtDesk = Callable[..., None]
EXPERTS = 16
"""32 slots: the reserve has 2, the readers' share 8, of which the first reader is promised 4."""


async def opened(desk: Any, client: Any, mode: str = "read", **named: Any) -> int:
    answer = await client.request(m.OpenNamespace, "moe", mode, **named)
    handle: int = answer["handle"]
    return handle


async def borrowed(client: Any, handle: int, count: int) -> m.Lent:
    lent = await client.request(m.Borrow, handle, count)
    assert isinstance(lent, m.Lent)
    return lent


async def reader(desk: Any) -> tuple[Any, int]:
    """A client and its reader's handle, on a namespace that nobody writes."""
    client = await desk.client()
    writer = await desk.create(client, experts=EXPERTS)
    await client.request(m.CloseNamespace, writer)
    return client, await opened(desk, client)


def test_a_reader_borrows_what_nobody_was_promised_and_reads_its_word(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client, handle = await reader(desk)
        lent = await borrowed(client, handle, 100)
        assert (lent.count, lent.page_bytes) == (13, PAGE_BYTES)
        page = Mapping(client.fds[-1], lent.page_bytes, is_writable=False)
        assert word_of(page, lent.word)[0] == desk.figures()["lent_slots"] == 13
        granted = await client.request(m.Acquire, handle, [(0, expert) for expert in range(16)], "param", 5.0)
        other = await opened(desk, client)
        again = await borrowed(client, other, 3)
        assert (again.page_bytes, client.fds[2:]) == (0, []), "the page is sent once"
        assert again.word != lent.word
        assert [word_of(page, one.word)[0] for one in (lent, again)] == [13, 3]
        await client.send(m.Release([granted.id]))
        await client.send(m.GiveBack(handle, 2))
        await client.send(m.GiveBack(other, 7))
        assert (await borrowed(client, other, 0)).count == 3
        assert [word_of(page, one.word)[0] for one in (lent, again)] == [2, 3]
        page.close()

    at_desk(scenario)


def test_what_is_lent_takes_effect_in_the_order_of_the_requests(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client, handle = await reader(desk)
        await client.send(m.Borrow(700, handle, 9))
        await client.send(m.GiveBack(handle, 3))
        await client.send(m.Borrow(701, handle, 5))
        assert [(await client.result(number)).count for number in (700, 701)] == [9, 5]
        await client.request(m.Namespaces)
        assert client.unasked == [], "each was answered once"

    at_desk(scenario)


def test_an_opening_waits_for_what_it_asks_back_and_not_for_a_message_to_its_owner(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client, handle = await reader(desk)
        lent = await borrowed(client, handle, 100)
        page = Mapping(client.fds[-1], lent.page_bytes, is_writable=False)
        word = word_of(page, lent.word)
        other = await desk.client()
        await other.send(m.OpenNamespace(700, "moe", "write", None, None, 22))
        await desk.until(lambda: word[0] < 13)
        assert word[0] == 4, "26 are not promised to the reader: 22 and four"
        assert (await borrowed(client, handle, 100)).count == 13, "nothing more is lent meanwhile"
        assert word[0] == 4
        await client.send(m.GiveBack(handle, 4))
        assert (await other.result(700))["lease_slots"] == 22
        page.close()

    at_desk(scenario)


def test_who_does_not_give_back_in_time_is_named_and_keeps_its_slots(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        desk.store.admission._recall_wait_s = 0.01
        client, handle = await reader(desk)
        lent = await borrowed(client, handle, 100)
        page = Mapping(client.fds[-1], lent.page_bytes, is_writable=False)
        writer = await opened(desk, client, "write")  # without a minimum it gets what is there
        await client.request(m.CloseNamespace, writer)
        with pytest.raises(CapacityError, match=r"9 slots that are lent were not given back in time: the reader pid \d+.* was "
                                                "promised 4 and lent 13"):  # fmt: skip
            await client.request(m.OpenNamespace, "moe", "write", None, None, 22)
        assert word_of(page, lent.word)[0] == 13, "it may be kept: the opening is over"
        granted = await client.request(m.Acquire, handle, [(0, expert) for expert in range(16)], "param", 5.0)
        assert len(granted.slots) == 16
        page.close()

    at_desk(scenario)


def test_a_session_that_ends_gives_everything_back_at_once(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client, handle = await reader(desk)
        await borrowed(client, handle, 100)
        other = await desk.client()
        await other.send(m.OpenNamespace(700, "moe", "write", None, None, 22))
        view = next(iter(desk.store.namespaces["moe"].views))
        await desk.until(lambda: view.loan.may_keep == 4)
        client.close()
        assert (await other.result(700))["lease_slots"] == 22

    at_desk(scenario)


def test_a_writer_borrows_nothing_and_a_closed_handle_is_refused_or_passed_over(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client, handle = await reader(desk)
        writer = await opened(desk, client, "write")
        assert (await borrowed(client, writer, 5)).count == 0
        await client.request(m.CloseNamespace, handle)
        await client.send(m.GiveBack(handle, 0))
        with pytest.raises(LeaseError, match="is not open in this session"):
            await client.request(m.Borrow, handle, 5)

    at_desk(scenario)


def test_a_word_is_one_views_until_it_closes_and_there_is_a_limit(at_desk: AtDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Any) -> None:
        client, handle = await reader(desk)
        first = await borrowed(client, handle, 1)
        others = [await opened(desk, client) for _ in range(3)]
        words = [(await borrowed(client, other, 0)).word for other in others[:2]]
        assert len({first.word, *words}) == 3
        with pytest.raises(CapacityError, match="3 handles of this session have borrowed"):
            await client.request(m.Borrow, others[2], 1)
        await client.request(m.CloseNamespace, others[0])
        assert (await borrowed(client, others[2], 0)).word == words[0]

    monkeypatch.setattr(session_loans, "WORDS", 3)
    at_desk(scenario)


def test_a_page_that_cannot_be_made_lends_nothing(at_desk: AtDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise CapacityError("cannot make shared memory: too many open files")

    async def scenario(desk: Any) -> None:
        client, handle = await reader(desk)
        with monkeypatch.context() as patch:
            patch.setattr(session_loans, "Words", fail)
            with pytest.raises(CapacityError, match="too many open files"):
                await client.request(m.Borrow, handle, 5)
        assert desk.store.namespaces["moe"].views[0].loan.count == 0
        assert (await borrowed(client, handle, 5)).count == 5

    at_desk(scenario)


def test_numbers_that_lie_mean_nothing_or_all_there_is(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client, handle = await reader(desk)
        assert (await borrowed(client, handle, -5)).count == 0
        assert (await borrowed(client, handle, 1 << 62)).count == 13
        await client.send(m.GiveBack(handle, 1 << 62))
        assert (await borrowed(client, handle, -5)).count == 13
        await client.send(m.GiveBack(handle, -1))
        assert (await borrowed(client, handle, 0)).count == 0

    at_desk(scenario)
