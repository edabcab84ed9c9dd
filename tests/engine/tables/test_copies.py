"""Queues of working copies, and what a commit's cut knows of its records."""

from __future__ import annotations

import random

import pytest

from paramstore.core.location import Extent, Identity, Located
from paramstore.engine.tables.copies import Cut, Queue, WorkingCopy

IDENTITY = Identity(1, 1)


def copies(count: int) -> list[WorkingCopy]:
    return [WorkingCopy((0, expert), IDENTITY) for expert in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_a_queue_keeps_the_order_of_coming_whoever_leaves(seed: int) -> None:
    chance, queue, expected = random.Random(seed), Queue(), []
    outside = copies(8)
    for _ in range(400):
        if outside and (not expected or chance.random() < 0.5):
            working = outside.pop(chance.randrange(len(outside)))
            queue.take_in(working)
            expected.append(working)
        else:
            working = expected.pop(chance.randrange(len(expected)))
            queue.let_out(working)
            outside.append(working)
            assert working.queued is None
        assert list(queue) == expected
        assert list(reversed(queue)) == expected[::-1]
        assert len(queue) == len(expected)


def test_a_cut_awaits_what_has_not_been_written_since_it_changed() -> None:
    unwritten, written, other, later = records = copies(4)
    cut = Cut(7, 3, records[:3], unwritten=2)
    unwritten.publish_in = other.publish_in = 7
    later.publish_in = 8
    written.cut_record = Located(Extent(0, 0, 4096), IDENTITY, 5)
    assert [cut.awaits(working) for working in records] == [True, False, True, False]
    assert list(cut.awaited()) == [unwritten, other]
    assert cut.located() == {written.key: written.cut_record}


def test_who_asks_a_cut_for_what_it_awaits_sees_what_lands_meanwhile_and_nothing_twice() -> None:
    records = copies(4)
    cut = Cut(7, 3, records, unwritten=4)
    for working in records:
        working.publish_in = 7
    awaited = cut.awaited()
    assert next(awaited) is records[0]
    for working in records[:3]:
        cut.keep(working, Located(Extent(0, 0, 4096), IDENTITY, 5))
    assert list(awaited) == records[3:]
    assert (cut.passed, cut.unwritten, list(cut.awaited())) == (3, 1, records[3:])
