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
            assert working.older is None, "it belongs to no queue any more"
            assert working.newer is None
        assert list(queue) == expected
        assert list(reversed(queue)) == expected[::-1]
        assert len(queue) == len(expected)


def test_a_cut_awaits_what_it_has_not_taken_and_what_it_has_not_written() -> None:
    untaken, unwritten, written, later = records = copies(4)
    cut = Cut(sequence=7, applies=3, records=records[:3])
    untaken.publish_in, later.publish_in = 7, 8
    unwritten.is_unwritten = True
    written.cut_record = Located(Extent(0, 0, 4096), IDENTITY, 5)
    assert [cut.awaits(working) for working in records] == [True, True, False, False]
    assert list(cut.to_write()) == [unwritten]
    assert cut.located() == {written.key: written.cut_record}
    assert not cut.is_whole
    cut.taken = 3
    assert cut.is_whole
