"""Which steps see which rows, and what is borrowed."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from paramstore.core.location import Extent, Identity, Located
from paramstore.storage.catalog.base import Row
from paramstore.storage.catalog.visibility import borrowed_rows, borrowing, in_force, rows_until

STEPS = st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True).map(sorted)


def row(first_step: int) -> Row:
    return Row(first_step, Located(Extent(0, (first_step + 1) * 4096, 4096), Identity(1, first_step), first_step))


def sees(step: int, firsts: Sequence[int]) -> int | None:
    """The row that a step sees, by the step at which it came."""
    return max((first for first in firsts if first <= step), default=None)


def test_older_steps_borrow_but_for_the_newest_of_them_and_snapshots() -> None:
    steps = [7, 1, 2, 3, 5, 6]
    assert borrowing(steps, {3}, retained_steps=2, held_steps=0) == [1, 2, 5]
    assert borrowing(steps, {3}, retained_steps=2, held_steps=2) == [1]
    assert borrowing(steps, {3}, retained_steps=5, held_steps=0) == [1]
    assert borrowing(steps, {3}, retained_steps=6, held_steps=0) == []
    assert borrowing([], set(), retained_steps=1, held_steps=0) == []


@given(firsts=STEPS, steps=STEPS)
def test_rows_that_some_step_sees_are_in_force(firsts: list[int], steps: list[int]) -> None:
    steps = sorted({*steps, firsts[-1]})
    seen = {sees(step, firsts) for step in steps} - {None}
    assert [one.first_step for one in in_force([row(first) for first in firsts], steps)] == sorted(seen)  # type: ignore[type-var]
    assert borrowed_rows([[row(first) for first in firsts], []], steps) == len(firsts) - len(seen)


@given(keys=st.lists(STEPS, max_size=5), entitled=STEPS, older=STEPS)
def test_rows_are_counted_for_the_last_of_the_older_steps_that_sees_them(
    keys: list[list[int]], entitled: list[int], older: list[int]
) -> None:
    newest = 31
    entitled, older = [*entitled, newest], [step for step in older if step not in entitled]
    counts, unseen = rows_until(keys, entitled, older)
    for gone in range(len(older) + 1):
        only_older = 0
        for firsts in keys:
            by_entitled, by_older = ({sees(step, firsts) for step in some} for some in (entitled, older[gone:]))
            only_older += len(by_older - by_entitled - {None})
        assert sum(counts[gone:]) == only_older
    by_all = [{sees(step, firsts) for step in (*entitled, *older)} - {None} for firsts in keys]
    assert unseen == sum(len(firsts) - len(seen) for firsts, seen in zip(keys, by_all, strict=True))
