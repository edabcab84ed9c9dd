from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading

import pytest

import paramstore_client as ps
from paramstore.wire import messages as m
from paramstore_testkit.wire.fake_daemon import FakeDaemon

KEYS = [(0, 0), (0, 1)]


def test_wait_returns_the_result_again_and_again(namespace: ps.Namespace) -> None:
    ticket = namespace.prefetch(KEYS)
    assert ticket.wait() == {"loaded": 0, "resident": 2, "skipped": 0, "bytes": 0}
    assert ticket.wait()["resident"] == 2
    assert ticket.error is None


def test_done_takes_in_an_answer_without_blocking(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Prefetch)
    ticket = namespace.prefetch(KEYS)
    daemon.wait_for(m.Prefetch)
    assert not ticket.done()
    daemon.let_go(m.Prefetch)
    while not ticket.done():
        pass
    assert ticket.wait()["resident"] == 2


def test_wait_that_times_out_cancels_nothing(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Prefetch)
    ticket = namespace.prefetch(KEYS)
    with pytest.raises(ps.WaitTimeout, match="prefetch on 'moe'"):
        ticket.wait(0.01)
    daemon.let_go(m.Prefetch)
    assert ticket.wait()["resident"] == 2
    assert daemon.requests(m.Cancel) == []


def test_a_ticket_says_what_it_is_of_and_what_became_of_it(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Prefetch)
    ticket = namespace.prefetch(KEYS)
    assert repr(ticket) == "<Ticket of prefetch on 'moe', under way>"
    daemon.let_go(m.Prefetch)
    ticket.wait()
    assert repr(ticket) == "<Ticket of prefetch on 'moe', done>"
    daemon.fail(m.Commit, ps.StepOutOfOrder("step 3 is not above 5"))
    with pytest.raises(ps.StepOutOfOrder):
        (failed := namespace.commit(3)).wait()
    assert repr(failed) == "<Ticket of commit 3 on 'moe', failed: StepOutOfOrder('step 3 is not above 5')>"


def test_error_of_the_daemon_arrives_as_its_class(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.fail(m.Commit, ps.StepOutOfOrder("step 3 is not above 5"))
    ticket = namespace.commit(3)
    with pytest.raises(ps.StepOutOfOrder, match="not above 5"):
        ticket.wait()
    assert isinstance(ticket.error, ps.StepOutOfOrder)


def test_answers_in_any_order_reach_their_own_tickets(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Prefetch)
    first = namespace.prefetch(KEYS)
    second = namespace.write_back()
    assert second.wait() == {"written": 0, "bytes": 0}
    daemon.let_go(m.Prefetch)
    assert first.wait()["resident"] == 2


def test_one_waiting_thread_settles_the_tickets_of_the_others(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Prefetch)
    tickets = [namespace.prefetch([(0, expert)]) for expert in range(4)]
    results: list[object] = []
    threads = [threading.Thread(target=lambda ticket=ticket: results.append(ticket.wait())) for ticket in tickets]
    for thread in threads:
        thread.start()
    daemon.wait_for(m.Prefetch, 4)
    daemon.let_go(m.Prefetch)
    for thread in threads:
        thread.join(timeout=5)
    assert len(results) == 4


def test_waiter_takes_over_when_the_reader_leaves(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Commit)
    daemon.hold(m.Prefetch)
    late = namespace.commit(1)
    early = namespace.prefetch(KEYS)
    reader = threading.Thread(target=early.wait)
    reader.start()
    outcome: list[object] = []
    waiter = threading.Thread(target=lambda: outcome.append(late.wait()))
    waiter.start()
    daemon.let_go(m.Prefetch)
    reader.join(timeout=5)
    daemon.let_go(m.Commit)
    waiter.join(timeout=5)
    assert [result["step"] for result in outcome] == [1]


@pytest.mark.parametrize("wait_timeout_s", [60.0, 1e10])  # the second is more than a condition waits at once
def test_waiter_takes_over_from_a_reader_that_timed_out(
    wait_timeout_s: float, daemon: FakeDaemon, namespace: ps.Namespace
) -> None:
    namespace.wait_timeout_s = wait_timeout_s
    daemon.hold(m.Commit)
    late = namespace.commit(1)
    outcome: list[object] = []

    def wait_long() -> None:
        outcome.append(late.wait())

    waiter = threading.Thread(target=wait_long)
    connection = namespace._connection
    token = [True]
    assert connection._try_become_reader(token)  # as a reader does whose own answer does not come
    waiter.start()
    while waiter.is_alive() and not connection.role._waiting:
        pass
    token.clear()
    connection._leave_reader(token)
    daemon.let_go(m.Commit)
    waiter.join(timeout=5)
    assert len(outcome) == 1


def test_waiter_keeps_its_own_deadline_while_another_thread_reads(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Prefetch)
    first, second = namespace.prefetch(KEYS), namespace.prefetch(KEYS)
    reader = threading.Thread(target=first.wait)
    reader.start()
    with pytest.raises(ps.WaitTimeout):
        second.wait(0.01)
    daemon.let_go(m.Prefetch)
    reader.join(timeout=5)
    assert second.wait()["resident"] == 2


def test_await_returns_the_result(namespace: ps.Namespace) -> None:
    async def run() -> object:
        return await namespace.prefetch(KEYS)

    assert asyncio.run(run())["resident"] == 2


def test_many_tickets_are_awaited_at_once_in_one_loop(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    async def run() -> list[dict[str, object]]:
        daemon.hold(m.Prefetch)
        tickets = [namespace.prefetch([(0, expert)]) for expert in range(4)]
        waiting = asyncio.gather(*tickets)
        await asyncio.sleep(0)
        await asyncio.to_thread(daemon.let_go, m.Prefetch)
        return await waiting

    assert len(asyncio.run(run())) == 4


def test_await_is_woken_by_a_thread_that_reads(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    async def run() -> object:
        daemon.hold(m.Prefetch)
        daemon.hold(m.Commit)
        commit = namespace.commit(1)
        reader = asyncio.create_task(asyncio.to_thread(commit.wait))
        ticket = namespace.prefetch(KEYS)
        await asyncio.to_thread(daemon.wait_for, m.Prefetch)
        awaiting = asyncio.ensure_future(ticket)
        await asyncio.to_thread(daemon.let_go, m.Prefetch)
        result = await awaiting
        await asyncio.to_thread(daemon.let_go, m.Commit)
        await reader
        return result

    assert asyncio.run(run())["resident"] == 2


def test_await_times_out_by_itself(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Acquire)

    async def run() -> None:
        ticket = namespace.begin_acquire(KEYS)
        ticket.timeout_s = 0.01
        with pytest.raises(ps.WaitTimeout):
            await ticket

    asyncio.run(run())


def test_cancelled_task_leaves_the_ticket_usable(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Prefetch)
    ticket = namespace.prefetch(KEYS)

    async def run() -> None:
        task = asyncio.ensure_future(ticket)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    daemon.let_go(m.Prefetch)
    assert ticket.wait()["resident"] == 2


def test_cancel_makes_the_wait_raise(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Prefetch)
    ticket = namespace.prefetch(KEYS)
    daemon.wait_for(m.Prefetch)
    assert ticket.cancel()
    with pytest.raises(ps.TicketCancelled):
        ticket.wait()


def test_cancel_of_a_settled_ticket_is_refused(namespace: ps.Namespace) -> None:
    ticket = namespace.prefetch(KEYS)
    ticket.wait()
    assert not ticket.cancel()


def test_apply_and_commit_refuse_to_be_cancelled(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Commit)
    daemon.hold(m.Apply)
    tickets = [namespace.apply(ps.AdamW()), namespace.commit(1)]
    assert [ticket.cancel() for ticket in tickets] == [False, False]
    daemon.let_go(m.Apply)
    daemon.let_go(m.Commit)
    assert [ticket.wait() is not None for ticket in tickets] == [True, True]
    assert daemon.requests(m.Cancel) == []


def test_abandoned_acquire_gives_its_lease_back_when_it_comes(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.script(m.Cancel, lambda session, request: None)
    daemon.hold(m.Acquire)
    ticket = namespace.begin_acquire(KEYS)
    ticket.abandon()
    daemon.wait_for(m.Release)  # of a lease that is not granted yet
    daemon.let_go(m.Acquire)
    daemon.wait_until(lambda: daemon.lease_count == 1)
    while not ticket.done():
        pass
    daemon.wait_until(lambda: daemon.lease_count == 0)


def test_bytes_moved_are_those_of_the_result(namespace: ps.Namespace) -> None:
    ticket = namespace.apply(ps.AdamW())
    ticket.wait()
    assert ticket.bytes_moved == 20


def test_error_that_nobody_waited_for_is_logged(
    daemon: FakeDaemon, namespace: ps.Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.fail(m.Commit, ps.VolumeError("volume 0 at offset 4096: EIO"))
    ticket = namespace.commit(1)
    while not ticket.done():
        pass
    with caplog.at_level(logging.WARNING, logger="paramstore_client.connection.ticket"):
        del ticket
    assert "commit 1 on 'moe' failed and nobody waited for it: VolumeError: volume 0 at offset 4096: EIO" in caplog.text


def test_a_ticket_that_succeeded_goes_without_code_in_which_python_would_drop_an_interrupt(namespace: ps.Namespace) -> None:
    ticket = namespace.apply(ps.AdamW())
    ticket.wait()
    called = list[str]()
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_qualname) if event == "call" else None)
    del ticket
    sys.setprofile(None)
    assert called == []


def test_error_that_was_raised_is_not_logged_again(
    daemon: FakeDaemon, namespace: ps.Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.fail(m.Commit, ps.VolumeError("EIO"))
    with pytest.raises(ps.VolumeError):
        namespace.commit(1).wait()
    gc.collect()
    assert caplog.text == ""


def test_ticket_that_was_cancelled_on_purpose_ends_silently(
    daemon: FakeDaemon, namespace: ps.Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.hold(m.Prefetch)
    ticket = namespace.prefetch(KEYS)
    daemon.wait_for(m.Prefetch)
    assert ticket.cancel()
    while not ticket.done():
        pass
    with caplog.at_level(logging.WARNING, logger="paramstore_client.connection.ticket"):
        del ticket
    assert caplog.text == ""
