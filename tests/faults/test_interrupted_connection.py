"""A connection that is interrupted anywhere loses no byte, no descriptor, no answer and no lease, and goes on."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path
from types import FrameType
from typing import TypeVar

import pytest
import torch

import paramstore as ps
from paramstore.wire import messages as m
from paramstore_testkit.interrupts import InterruptAtPoint, is_finalizing
from paramstore_testkit.wire.fake_daemon import FakeDaemon

T = TypeVar("T")

FIELDS = {"gate_up": (8, 4), "down": (4, 8)}
KEYS = [(layer, expert) for layer in range(2) for expert in range(4)]
CONNECTION = tuple(
    f"paramstore_client/{name}.py"
    for name in (
        "connection/shared_socket", "connection/inbox", "connection/open_tickets", "connection/outbox", "connection/reader_role",
        "connection/segments", "connection/ticket", "handle/lease",
    )
)  # fmt: skip
"""Code in which interrupts come."""
STRIDE = 41
"""Of so many points one is tried; the first at random."""
LIMIT_S = 5.0
"""Longest wait of these tests: what an interrupt has lost is waited for so long."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    """A daemon with a namespace, whose experts have their numbers for values."""
    with FakeDaemon(tmp_path / "daemon.sock", wait_timeout_s=LIMIT_S) as daemon:
        with ps.connect(str(daemon.path), timeout_s=LIMIT_S) as store:
            namespace = store.create_namespace("moe", ps.adamw_schema(FIELDS), layers=2, experts=4)
            namespace.initialize(lambda key: {name: torch.full(shape, 16.0 * key[0] + key[1]) for name, shape in FIELDS.items()})
            namespace.commit(1).wait()
        yield daemon


def again(call: Callable[[], T]) -> T:
    """What `call` gives, called again where it is interrupted."""
    try:
        return call()
    except KeyboardInterrupt:
        return call()


class Talk:
    """A client that leases experts, whose memory it has to map first, gives them back, and is asked for the memory."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        gc.collect()
        daemon.wait_until(lambda: not daemon.sessions)  # those of before have closed their sockets
        self.fd_count = self.count_fds()
        self.store = ps.connect(str(daemon.path), timeout_s=LIMIT_S)
        self.namespace = self.store.open_namespace("moe")
        self.asked_back: list[int] = []

    def run(self) -> None:
        """Everything that is interrupted."""
        namespace, daemon = self.namespace, self.daemon
        tickets = [namespace.begin_acquire([key]) for key in KEYS]
        leases = [again(ticket.wait) for ticket in reversed(tickets)]
        self.asked_back = sorted({segment for segment, *_ in daemon.namespaces["moe"].slots.values()})
        daemon.ask_back(self.asked_back)
        again(namespace.prefetch(KEYS).wait)
        assert daemon.lease_count == len(leases), "who waits again gets the lease itself"
        for lease in leases:
            again(lease.release)
        with namespace.acquire(KEYS):
            pass

    def check(self) -> None:
        """Everything that must hold after it."""
        gc.collect()
        connection = self.namespace._connection
        with self.namespace.acquire(KEYS) as lease:
            assert [lease[key]["down"].unique().item() for key in KEYS] == [16.0 * layer + expert for layer, expert in KEYS]
        self.namespace.prefetch(KEYS).wait()  # takes in what else has come
        self.daemon.wait_until(lambda: self.daemon.lease_count == 0)
        self.daemon.wait_until(lambda: not set(self.asked_back) & set(self.daemon.memory.segments))
        assert not connection._tickets
        assert not connection.role.is_taken
        assert not connection._sending.locked()
        assert connection.segments.lease_count == 0
        self.store.close()
        self.daemon.wait_until(lambda: not self.daemon.sessions)
        assert self.count_fds() == self.fd_count

    def count_fds(self) -> int:
        """File descriptors of this process, but for those of the daemon's own memory."""
        return len(os.listdir("/proc/self/fd")) - len(self.daemon.memory.segments)


def interrupted_at(point: int, daemon: FakeDaemon) -> bool:
    talk = Talk(daemon)
    try:
        with InterruptAtPoint(point, CONNECTION) as interrupt:
            talk.run()
        talk.check()
    except BaseException as error:
        error.add_note(f"interrupted at point {point}, {interrupt.place}")
        talk.store.close()
        raise
    return interrupt.is_raised


def test_an_interrupt_at_some_points_loses_nothing(daemon: FakeDaemon) -> None:
    for point in (20, 420, 1001):
        assert interrupted_at(point, daemon)


@pytest.mark.slow
def test_an_interrupt_at_any_point_loses_nothing(daemon: FakeDaemon) -> None:
    first = random.randrange(1, STRIDE)
    print(f"first {first}")  # noqa: T201 - shown when it fails
    assert sum(1 for _ in takewhile(lambda point: interrupted_at(point, daemon), count(first, STRIDE))) > 2000 // STRIDE


def test_signals_as_fast_as_a_thread_can_send_them_lose_nothing(daemon: FakeDaemon) -> None:
    """Real signals come while descriptors and answers are read, and a second thread reads through the same connection."""
    talk, has_ended, armed = Talk(daemon), threading.Event(), list[int]()
    namespace, main = talk.namespace, threading.main_thread().ident or 0
    others = list[object]()

    def interrupt() -> None:
        while not has_ended.wait(0.0002):
            signal.pthread_kill(main, signal.SIGUSR1)

    def handle(_: int, frame: FrameType | None) -> None:
        if armed and not is_finalizing(frame):
            armed.clear()
            raise TimeoutError

    def read_too() -> None:
        while not has_ended.is_set():
            others.append(namespace.prefetch(KEYS).wait())

    before = signal.signal(signal.SIGUSR1, handle)
    threads = [threading.Thread(target=interrupt), threading.Thread(target=read_too)]
    for thread in threads:
        thread.start()
    interrupts = 0
    try:
        for _ in range(150):
            try:
                armed.append(1)
                namespace.acquire(KEYS).release()
                armed.clear()
                daemon.ask_back([segment for segment, *_ in daemon.namespaces["moe"].slots.values()])
            except TimeoutError:
                interrupts += 1
    finally:
        armed.clear()
        has_ended.set()
        for thread in threads:
            thread.join(LIMIT_S)
        signal.signal(signal.SIGUSR1, before)
    talk.check()
    assert interrupts
    assert others


async def awaited(ticket: ps.Ticket[object]) -> object:
    return await asyncio.wait_for(ticket, LIMIT_S / 2)


def polled(ticket: ps.Ticket[object], daemon: FakeDaemon) -> object:
    ticket.done()
    daemon.wait_for(m.Prefetch)
    return ticket.wait()


@pytest.mark.parametrize("way", ["wait", "done", "await"])
def test_what_an_interrupt_has_left_to_send_is_sent_though_another_thread_reads(
    way: str, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(what: str) -> None:
        raise KeyboardInterrupt

    with ps.connect(str(daemon.path), timeout_s=LIMIT_S) as store:
        namespace = store.open_namespace("moe", "write")
        daemon.hold(m.WriteBack)
        reader = threading.Thread(target=namespace.write_back().wait)
        reader.start()
        daemon.wait_for(m.WriteBack)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt), namespace.together():
            ticket = namespace.prefetch(KEYS)
            patch.setattr(namespace._connection, "_send_all", interrupted)
        if way == "wait":
            outcome = ticket.wait(LIMIT_S / 2)
        elif way == "done":
            outcome = polled(ticket, daemon)
        else:
            outcome = asyncio.run(awaited(ticket))
        assert outcome["resident"] == len(KEYS)
        daemon.let_go(m.WriteBack)
        reader.join(LIMIT_S)


def test_an_interrupted_reader_leaves_a_loop_alone_that_was_closed_while_it_watched(daemon: FakeDaemon) -> None:
    with ps.connect(str(daemon.path), timeout_s=LIMIT_S) as store:
        connection, loop, interrupts = store._connection, asyncio.new_event_loop(), [KeyboardInterrupt()]
        connection.watch(loop)
        loop.close()

        def convert(answer: object) -> str:
            while interrupts:
                raise interrupts.pop()
            return "done"

        ticket = connection.request(m.Stats(connection.next_id()), what="stats", convert=convert)
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
        assert ticket.wait() == "done"
        connection.unwatch(loop)
