from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch

import paramstore_client as ps
from paramstore.testing.clock import ManualClock
from paramstore.wire import messages as m
from paramstore.wire.codec import encode
from paramstore_testkit.wire.fake_daemon import FakeDaemon, FakeSession

KEYS = [(0, 0), (0, 1)]

forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
"""Python 3.12 warns of what these tests are about."""


def test_requests_reach_the_daemon_in_call_order(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    tickets = [namespace.prefetch([(0, number % 4)]) for number in range(200)]
    for ticket in reversed(tickets):
        ticket.wait()
    ids = [request.id for request in daemon.requests(m.Prefetch)]
    assert ids == sorted(ids)


def test_what_a_thread_sends_together_leaves_in_one_call_and_in_order(
    daemon: FakeDaemon, namespace: ps.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, calls = namespace._connection, list[int]()
    send_some = connection._send_some

    def counting() -> bool:
        calls.append(len(connection._outbox.first()))
        return send_some()

    monkeypatch.setattr(connection, "_send_some", counting)
    lease = namespace.acquire(KEYS)
    calls.clear()
    with namespace.together():
        lease.release()
        tickets = [namespace.begin_acquire([key]) for key in KEYS]
        assert calls == []
    assert calls == [3]
    for ticket in tickets:
        ticket.wait().release()
    daemon.wait_for(m.Release, 3)
    assert [type(request) for request in daemon.received[-5:-2]] == [m.Release, m.Acquire, m.Acquire]
    with namespace.together():
        assert namespace.begin_acquire(KEYS).wait()[KEYS[0]]["down"].shape == (4, 8), "who waits inside sends first"


def test_what_is_sent_together_is_sent_where_it_ends_with_an_error_and_by_other_threads(
    daemon: FakeDaemon, namespace: ps.Namespace
) -> None:
    with contextlib.suppress(KeyError), namespace.together():
        first = namespace.begin_acquire(KEYS)
        raise KeyError
    first.wait().release()
    with namespace.together():
        ticket = namespace.begin_acquire(KEYS)
        other = threading.Thread(target=lambda: namespace.acquire(KEYS).release())
        other.start()
        other.join()
        assert len(daemon.requests(m.Acquire)) == 3
    ticket.wait().release()


def test_who_waits_for_what_it_gathered_sends_it_though_another_thread_reads(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.WriteBack)
    held = namespace.write_back()
    reader = threading.Thread(target=held.wait)
    reader.start()
    daemon.wait_for(m.WriteBack)
    with namespace.together():
        namespace.begin_acquire(KEYS).wait(1.0).release()
    daemon.let_go(m.WriteBack)
    reader.join(5)


def test_a_task_that_awaits_what_it_gathered_sends_it(namespace: ps.Namespace) -> None:
    async def gather() -> None:
        with namespace.together():
            (await namespace.begin_acquire(KEYS)).release()

    asyncio.run(asyncio.wait_for(gather(), 2.0))


def test_a_lease_that_was_granted_and_not_read_is_released_when_it_is_given_up(
    daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace
) -> None:
    ticket = namespace.begin_acquire(KEYS)
    daemon.wait_until(lambda: daemon.lease_count == 1)
    ticket.abandon()
    daemon.wait_until(lambda: daemon.lease_count == 0)
    namespace.acquire(KEYS).release()
    store.close()


def test_more_than_one_call_can_send_goes_out_whole(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.script(m.Prefetch, lambda session, request: session.send(m.Done(request.id, {"keys": len(request.keys)})))
    with namespace.together():
        tickets = [namespace.prefetch([(0, 0)] * (1 + number % 300)) for number in range(1000)]
    assert [ticket.wait()["keys"] for ticket in tickets] == [1 + number % 300 for number in range(1000)]


def test_the_end_of_what_is_sent_together_waits_a_bounded_time(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.pause()
    namespace._connection.timeout_s = 0.1

    def send_much() -> None:
        with namespace.together():
            for _ in range(10_000):
                namespace.prefetch([(0, 0)] * 1000)

    with pytest.raises(ps.WaitTimeout, match="took nothing off its socket"):
        send_much()


def test_full_socket_does_not_deadlock_with_a_daemon_that_waits_for_us_to_read(
    daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace
) -> None:
    # The daemon's thread blocks in its answers until somebody reads them, and reads nothing itself meanwhile.
    daemon.script(m.Extra, lambda session, request: session.send(m.Done(request.id, bytes(60_000))))
    connection = namespace._connection
    tickets = [
        connection.request(m.Extra(connection.next_id(), 1, 7), what="extra", convert=lambda answer: len(answer.result))
        for _ in range(1000)
    ]
    assert {ticket.wait() for ticket in tickets} == {60_000}


def test_daemon_that_takes_nothing_off_its_socket_is_not_waited_for_without_end(
    daemon: FakeDaemon, namespace: ps.Namespace
) -> None:
    daemon.pause()
    namespace._connection.timeout_s = 0.1
    tickets = (namespace.prefetch([(0, 0)] * 1000) for _ in range(10_000))
    with pytest.raises(ps.WaitTimeout, match="took nothing off its socket"):
        list(tickets)


def test_the_seconds_that_were_waited_are_counted_and_those_between_are_not(
    daemon: FakeDaemon, namespace: ps.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    connection = namespace._connection
    monkeypatch.setattr(connection, "clock", clock)
    namespace.prefetch(KEYS).wait()
    before = connection.role.waited_s
    clock.advance(5.0)
    monkeypatch.setattr(connection, "_wait_readable", lambda deadline_s: clock.advance(2.0))
    daemon.hold(m.WriteBack)
    with pytest.raises(ps.WaitTimeout):
        namespace.write_back().wait(1.0)
    assert connection.role.waited_s == before + 2.0


def test_requests_of_many_threads_all_get_their_answers(namespace: ps.Namespace) -> None:
    outcomes: list[int] = []

    def run() -> None:
        for expert in range(4):
            with namespace.acquire([(1, expert)]) as lease:
                outcomes.append(int(lease[1, expert]["down"][0, 0]))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert sorted(outcomes) == sorted([16, 17, 18, 19] * 6)


def test_threads_and_loops_share_one_client(namespace: ps.Namespace) -> None:
    async def loop_side() -> None:
        for expert in range(4):
            with await namespace.begin_acquire([(0, expert)]) as lease:
                assert lease[0, expert]["down"][0, 0] == expert

    def thread_side() -> None:
        for expert in range(4):
            namespace.prefetch([(0, expert)]).wait()

    threads = [threading.Thread(target=asyncio.run, args=(loop_side(),)) for _ in range(2)]
    threads += [threading.Thread(target=thread_side) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads)


def test_tickets_in_flight_fail_when_the_daemon_dies(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Commit)
    tickets = [namespace.commit(1), namespace.commit(2)]
    daemon.wait_for(m.Commit, 2)
    daemon.stop()
    for ticket in tickets:
        with pytest.raises(ps.StoreUnavailable, match="went away"):
            ticket.wait()


def test_threads_that_wait_are_woken_when_the_daemon_dies(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Commit)
    errors: list[BaseException] = []

    def run(step: int) -> None:
        try:
            namespace.commit(step).wait()
        except ps.StoreUnavailable as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(step,)) for step in range(3)]
    for thread in threads:
        thread.start()
    daemon.wait_for(m.Commit, 3)
    daemon.stop()
    for thread in threads:
        thread.join(timeout=5)
    assert len(errors) == 3


def test_awaiting_task_is_woken_when_the_daemon_dies(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    async def run() -> None:
        daemon.hold(m.Commit)
        task = asyncio.ensure_future(namespace.commit(1))
        await asyncio.sleep(0)
        await asyncio.to_thread(daemon.stop)
        with pytest.raises(ps.StoreUnavailable):
            await task

    asyncio.run(run())


def test_calls_after_the_daemon_died_say_what_to_do(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.stop()
    with pytest.raises(ps.StoreUnavailable):
        namespace.steps()
    with pytest.raises(ps.StoreUnavailable, match=r"^(?!.*reconnect.*reconnect).*store\.reconnect\(\)"):
        namespace.steps()


def test_what_the_daemon_said_before_it_died_is_still_heard(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    ticket = namespace.prefetch(KEYS)
    daemon.wait_for(m.Prefetch)
    daemon.stop()
    assert ticket.wait()["resident"] == 2


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x05\x00\x00\x00hello",
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        b"\x00\x00\x00\x00",
        b"\x07\x00\x00\x00\x93\xa4done\xff",
    ],
)
def test_garbage_is_a_protocol_error_for_whoever_waits(daemon: FakeDaemon, namespace: ps.Namespace, garbage: bytes) -> None:
    daemon.script(m.Steps, lambda session, request: session.send_bytes(garbage))
    with pytest.raises(ps.ProtocolError):
        namespace.steps()
    with pytest.raises(ps.StoreUnavailable):
        namespace.steps()


def test_answer_to_a_request_that_was_never_made_is_a_protocol_error(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.script(m.Steps, lambda session, request: session.send(m.Done(9999, [])))
    with pytest.raises(ps.ProtocolError, match="9999"):
        namespace.steps()


def test_answer_of_another_kind_fails_its_ticket_only(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.script(m.Steps, lambda session, request: session.send(m.Granted(request.id, [], [])))
    with pytest.raises(ps.ProtocolError, match="Granted"):
        namespace.steps()
    assert namespace.prefetch(KEYS).wait()["resident"] == 2


def test_result_of_another_type_fails_its_ticket_only(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.script(m.Steps, lambda session, request: session.send(m.Done(request.id, "three")))
    with pytest.raises(ps.ProtocolError):
        namespace.steps()
    assert namespace.prefetch(KEYS).wait()["resident"] == 2


def test_answers_before_garbage_are_kept(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    def answer_and_rave(session: FakeSession, request: m.Steps) -> None:
        session.send_bytes(bytes(encode(m.Done(request.id, [1, 2]))) + b"\xff\xff\xff\xff")

    daemon.script(m.Steps, answer_and_rave)
    assert namespace.steps() == [1, 2]


def test_interrupt_while_waiting_leaves_the_client_usable(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Prefetch)
    ticket = namespace.prefetch(KEYS)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    daemon.let_go(m.Prefetch)
    assert ticket.wait()["resident"] == 2


@forks
def test_forked_child_is_refused_and_the_parent_goes_on(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            namespace.steps()
        except ps.ForkedClient as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as said:
        assert f"forked child {child}" in said.read()
    assert namespace.steps() == []


@forks
def test_forked_child_does_not_keep_the_socket(store: ps.Store) -> None:
    descriptor = store._connection._fd
    child = os.fork()
    if child == 0:
        # Were it open here, the daemon would not see the parent die while this child lives.
        os._exit(int(os.path.lexists(f"/proc/self/fd/{descriptor}")))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@forks
def test_lease_dropped_in_a_forked_child_sends_nothing(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    lease = namespace.acquire(KEYS)
    child = os.fork()
    if child == 0:
        lease.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert namespace.steps() == []
    assert daemon.lease_count == 1
    lease.release()


def test_too_many_unanswered_requests_are_refused(
    daemon: FakeDaemon, namespace: ps.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramstore_client.connection.open_tickets.TICKETS_MAX", 2)
    daemon.hold(m.Prefetch)
    tickets = [namespace.prefetch(KEYS), namespace.prefetch(KEYS)]
    with pytest.raises(ps.CapacityError, match="2 requests"):
        namespace.prefetch(KEYS)
    daemon.let_go(m.Prefetch)
    assert [ticket.wait()["resident"] for ticket in tickets] == [2, 2]


def test_close_wakes_a_thread_that_waits(daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace) -> None:
    daemon.hold(m.Commit)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            namespace.commit(1).wait()
        except ps.StoreUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    daemon.wait_for(m.Commit)
    store.close()
    thread.join(timeout=5)
    assert "closed by this client" in str(errors[0])


def test_no_descriptor_is_left_after_close(daemon: FakeDaemon, open_descriptors: Callable[[], int]) -> None:
    def descriptors_of_clients() -> int:
        daemon.wait_until(lambda: not daemon.sessions)
        return open_descriptors() - len(daemon.memory.segments)

    def use_a_client() -> None:
        with ps.connect(daemon.path) as store:
            store.open_namespace("a", mode="write").initialize(lambda key: {"w": torch.zeros(4)})
            with store.open_namespace("a").acquire([(0, 0)]) as lease:
                assert lease[0, 0]["w"].shape == (4,)

    with ps.connect(daemon.path) as store:
        store.create_namespace("a", ps.param_schema({"w": ((4,), "float32")}), layers=1, experts=1)
    before = descriptors_of_clients()
    for _ in range(3):
        use_a_client()
    assert descriptors_of_clients() == before


def test_a_message_that_cannot_travel_is_its_callers_error_and_leaves_nothing_behind(daemon: FakeDaemon, store: ps.Store) -> None:
    connection = store._connection
    for wrong in (1 << 70, object(), "\ud800"):
        message = m.Extra(connection.next_id(), 1, wrong)  # type: ignore[arg-type]
        with pytest.raises(ps.ConfigError, match="extra: Extra cannot be sent"):
            connection.request(message, what="extra", convert=lambda answer: answer)
    assert connection._tickets == {}
    assert store.namespaces() == []
    assert daemon.requests(m.Extra) == []


def test_a_wait_may_be_longer_than_poll_takes(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    """As the end of an initialization by ranks, which waits for each value of the others."""
    daemon.hold(m.Prefetch)
    ticket = namespace.prefetch(KEYS)
    threading.Timer(0.01, daemon.let_go, (m.Prefetch,)).start()
    assert ticket.wait(1e8)["resident"] == 2
