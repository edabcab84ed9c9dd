"""Frames on their way out: in order, also where a call takes a part of them; a thread may hold its own back."""

from __future__ import annotations

import random
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import count, takewhile

import pytest

from paramstore_client.connection.outbox import FRAMES_MAX, Outbox
from paramstore_testkit.interrupts import InterruptAtPoint


@pytest.mark.parametrize("seed", range(5))
def test_what_goes_out_is_what_was_added_however_much_each_call_takes(seed: int) -> None:
    rng, outbox, sent = random.Random(seed), Outbox(), bytearray()
    frames = [rng.randbytes(rng.randint(1, 50)) for _ in range(3 * FRAMES_MAX)]
    for frame in frames:
        outbox.add(frame)
    while outbox:

        def take(offered: Sequence[memoryview]) -> int:
            whole = b"".join(offered)
            taken = rng.randint(0, len(whole))
            sent.extend(whole[:taken])
            return taken

        outbox.send(take)
    assert sent == b"".join(frames), f"seed {seed}"


def test_one_call_is_given_so_many_frames_at_most() -> None:
    outbox = Outbox()
    for _ in range(FRAMES_MAX + 1):
        outbox.add(b"x")
    assert len(outbox.first()) == FRAMES_MAX
    outbox.clear()
    assert (bool(outbox), outbox.first()) == (False, [])


def test_a_thread_holds_its_own_frames_back_to_the_end_of_its_outermost_block() -> None:
    outbox, others, ends = Outbox(), list[bool](), list[bool]()
    with outbox.gathered(ends.append):
        with outbox.gathered(ends.append):
            assert outbox.is_gathering
        assert (outbox.is_gathering, ends) == (True, [])
        thread = threading.Thread(target=lambda: others.append(outbox.is_gathering))
        thread.start()
        thread.join()
    assert (outbox.is_gathering, others, ends) == (False, [False], [True])
    with suppress(KeyError), outbox.gathered(ends.append):
        raise KeyError
    assert (outbox.is_gathering, ends) == (False, [True, False])


def test_a_block_whose_begin_was_interrupted_holds_nothing_back() -> None:
    outbox = Outbox()
    outbox.gathered(print).__enter__()  # its end never comes
    assert not outbox.is_gathering


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupt_at_any_moment_sends_nothing_twice_and_loses_nothing(seed: int) -> None:
    """Signals come as fast as another thread can send them, while real sockets take what they have room for."""
    rng, outbox, came, has_ended = random.Random(seed), Outbox(), bytearray(), threading.Event()
    frames = [rng.randbytes(rng.randint(1, 3000)) for _ in range(4000)]
    for frame in frames:
        outbox.add(frame)
    ours, theirs = socket.socketpair()
    sending, interrupts = list[int](), 0

    def read() -> None:
        while data := theirs.recv(1 << 16):
            came.extend(data)

    def interrupt() -> None:
        while not has_ended.wait(0.0001):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def handle(*_: object) -> None:
        if sending:
            sending.clear()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handle)
    threads = [threading.Thread(target=read), threading.Thread(target=interrupt)]
    for thread in threads:
        thread.start()
    while outbox:
        try:
            sending.append(1)
            outbox.send(ours.sendmsg)
            sending.clear()
        except KeyboardInterrupt:
            interrupts += 1
    has_ended.set()
    threads[1].join()
    signal.signal(signal.SIGUSR1, before)
    ours.close()
    threads[0].join()
    theirs.close()
    assert came == b"".join(frames), f"seed {seed}"
    assert interrupts


def dropped_in_spite_of(point: int) -> bool:
    outbox, calls = Outbox(), list[int]()
    outbox.add(b"first")
    outbox.add(b"second")

    def take_one_byte_and_break(offered: Sequence[memoryview]) -> int:
        calls.append(1)
        if len(calls) > 1:
            raise BrokenPipeError(32, "the daemon is gone")
        return 1

    with InterruptAtPoint(point, ("connection/outbox.py",)) as interrupt:
        outbox.send(take_one_byte_and_break)
    outbox.send(take_one_byte_and_break)
    if outbox:
        outbox.send(take_one_byte_and_break)
    assert not outbox, interrupt.place
    assert outbox.first() == [], interrupt.place
    return interrupt.is_raised


def test_an_interrupt_anywhere_leaves_what_can_be_dropped() -> None:
    assert sum(1 for _ in takewhile(dropped_in_spite_of, count(1))) > 10
