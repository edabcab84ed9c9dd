"""Full collections leave alone what an earlier one found alive, and what is garbage among that is freed when it is asked for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from paramstore.core.slices import slices
from paramstore.daemon import garbage

pytestmark = pytest.mark.slow


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _spared() -> Iterator[None]:
    with garbage.tables_spared():
        yield
    gc.collect()


def test_what_survives_a_full_collection_is_looked_at_by_no_later_one() -> None:
    knot = Knot()
    seen = weakref.ref(knot)
    gc.collect()
    assert gc.get_freeze_count() > 0
    del knot
    gc.collect()
    assert seen() is not None, "nobody looked"
    garbage.look_at_everything()
    assert seen() is None


def test_garbage_that_came_since_is_freed_and_so_is_what_nobody_refers_to() -> None:
    gc.collect()
    knot = Knot()
    tied = weakref.ref(knot)
    del knot
    gc.collect()
    assert tied() is None
    kept = [Knot() for _ in range(3)]
    for one in kept:
        one.itself = None  # type: ignore[assignment]  # no cycle any more
    refs = [weakref.ref(one) for one in kept]
    gc.collect()
    del kept, one
    assert [ref() for ref in refs] == [None] * 3, "a frozen object goes with its last reference"


def _is_frozen_with(work: Callable[[], object]) -> bool:
    """Whether a knot tied before `work` outlives the next young collection."""
    gc.collect()
    knot = Knot()
    seen = weakref.ref(knot)
    del knot
    work()
    gc.collect(0)
    return seen() is not None


def test_what_comes_with_much_work_in_slices_is_looked_at_by_nobody() -> None:
    gc.disable()
    try:
        assert _is_frozen_with(lambda: list(slices(range(garbage.BURST + 1))))
        assert not _is_frozen_with(lambda: list(slices(range(garbage.BURST)))), "too little to matter"
    finally:
        gc.enable()
    assert gc.get_freeze_count() > 0
    garbage.look_at_everything()
    assert gc.get_freeze_count() == 0, "nothing is frozen in passing"


def test_a_full_collection_that_python_has_put_off_for_long_looks_at_nothing() -> None:
    gc.disable()
    try:
        assert not _is_frozen_with(lambda: [gc.collect(1) for _ in range(3)])
        frozen = gc.get_freeze_count()
        kept = [Knot()]
        for _ in range(garbage.MIDDLING_MAX + 1):
            gc.collect(1)
        knot = Knot()
        seen = weakref.ref(knot)
        del knot
        gc.collect()
    finally:
        gc.enable()
    assert seen() is not None
    assert gc.get_freeze_count() > frozen
    assert len(kept) == 1


def test_a_process_whose_tables_are_not_spared_needs_no_look() -> None:
    gc.callbacks.remove(garbage._freeze)
    frozen = gc.get_freeze_count()
    garbage.look_at_everything()
    assert garbage._freeze not in gc.callbacks
    assert gc.get_freeze_count() == frozen
    gc.callbacks.append(garbage._freeze)


def test_full_collections_come_often_and_small() -> None:
    assert gc.get_threshold() == garbage.THRESHOLDS


def test_a_process_collects_as_before_once_its_daemon_has_ended() -> None:
    def state() -> tuple[object, ...]:
        return gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count()

    gc.callbacks.remove(garbage._freeze)  # the fixture's
    gc.set_threshold(600, 9, 9)
    gc.unfreeze()
    before = state()
    with garbage.tables_spared():
        gc.collect()
        assert gc.get_freeze_count() > 0
    assert state() == before
    gc.callbacks.append(garbage._freeze)
