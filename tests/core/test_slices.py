"""Slices hold everything, in order, and no more than their size."""

from __future__ import annotations

import pytest

from paramstore.core import slices as module
from paramstore.core.slices import Tally, emptied, slices


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_slices_hold_everything_in_order_and_none_is_larger_than_the_limit(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE", 3)
    parts = list(slices(range(count)))
    assert [item for part in parts for item in part] == list(range(count))
    assert all(1 <= len(part) <= 3 for part in parts)
    assert len(parts) == -(-count // 3)


def test_a_length_of_its_own_and_what_went_through_in_all() -> None:
    before = Tally.items
    assert [len(part) for part in slices(range(10), 4)] == [4, 4, 2]
    assert Tally.items - before == 10


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_lists_are_emptied_in_slices(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE", 3)
    first, second = list(range(count)), list(range(3))
    left = [len(first) + len(second) for _ in emptied(first, second)]
    assert (first, second) == ([], [])
    assert all(before - after <= 3 for before, after in zip([count + 3, *left], left, strict=False))
