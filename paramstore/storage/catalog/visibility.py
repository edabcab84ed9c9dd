"""Which steps see which rows of a namespace, and which of either have borrowed their room. Pure.

A step that nothing keeps but readers is *older*. The newest few of the older ones may be entitled to room; the others have borrowed
it, and with it the rows that no other step sees.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from itertools import pairwise

from paramstore.storage.catalog.base import Row


def in_force(rows: list[Row], visible: Sequence[int]) -> list[Row]:
    """The rows that are in force at some visible step, the newest among them. visible: sorted, with the newest step of all."""
    if len(rows) == 1:
        return rows
    kept = [row for row, after in pairwise(rows) if visible[bisect_left(visible, row.first_step)] < after.first_step]
    return [*kept, rows[-1]]


def borrowing(committed: Iterable[int], snapshots: Container[int], *, retained_steps: int, held_steps: int) -> list[int]:
    """Those of all `committed` steps that have borrowed their room, oldest first. held_steps: how many older ones are entitled to
    theirs."""
    older = [step for step in sorted(committed)[:-retained_steps] if step not in snapshots]
    return older[: max(0, len(older) - held_steps)]


def borrowed_rows(rows: Iterable[list[Row]], entitled: Sequence[int]) -> int:
    """How many rows no `entitled` step sees. rows: those of keys. entitled: sorted, with the newest step of all."""
    return sum(len(some) - len(in_force(some, entitled)) for some in rows if some)


def rows_until(firsts: Iterable[Sequence[int]], entitled: Sequence[int], older: Sequence[int]) -> tuple[list[int], int]:
    """Counts the rows that no `entitled` step sees: those of each of the `older` steps that stay until it goes, where the oldest
    go first; and those that nobody sees. firsts: for each key the steps at which its rows came into force.

    Steps are sorted; the newest of all is entitled.
    """
    counts, unseen = [0] * len(older), 0
    for some in firsts:
        for first, after in pairwise(some):
            if entitled[bisect_left(entitled, first)] < after:
                continue
            newest = bisect_left(older, after) - 1
            if newest >= 0 and older[newest] >= first:
                counts[newest] += 1
            else:
                unseen += 1
    return counts, unseen
