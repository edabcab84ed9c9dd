"""Frames on their way out: in order, also where a call takes a part of them; a thread may hold its own back."""

from __future__ import annotations

import random
import threading
from contextlib import suppress

import pytest

from paramstore_client.connection.outbox import FRAMES_MAX, Outbox


@pytest.mark.parametrize("seed", range(5))
def test_what_goes_out_is_what_was_added_however_much_each_call_takes(seed: int) -> None:
    rng, outbox, sent = random.Random(seed), Outbox(), bytearray()
    frames = [rng.randbytes(rng.randint(1, 50)) for _ in range(3 * FRAMES_MAX)]
    for frame in frames:
        outbox.add(frame)
    while outbox:
        offered = b"".join(outbox.first())
        taken = rng.randint(0, len(offered))
        sent += offered[:taken]
        outbox.take_off(taken)
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
