"""What a handle is promised when it opens: shares that are kept apart, halves of what is left, and what those who are gone hold."""

from __future__ import annotations

import pytest

from paramstore.core.schema import Schema
from paramstore.engine.planner.promises import Opening, holders, promise, reserve_of, share_of, slots_promising
from paramstore.engine.tables.namespace import View, WriterGroup
from paramstore.errors import CapacityError
from paramstore_testkit.stores.small_planner import SmallPlanner

KEYS = [(0, expert) for expert in range(16)]
OPAQUE = Schema.param({"w": ((3, 5), "bfloat16")})


def desk(param_slots: int = 32) -> SmallPlanner:
    return SmallPlanner(experts=16, param_slots=param_slots, working_slots=2, extents=64)


def opaque_desk() -> SmallPlanner:
    return SmallPlanner(experts=16, param_slots=16, schema=OPAQUE)


def open_view(small: SmallPlanner, mode: str, *, least: int = 0, most: int | None = None, world_size: int = 1) -> View:
    is_writer = mode == "write"
    opening = Opening(WriterGroup("job", world_size) if is_writer else None, least, most)
    return small.planner.views.open(small.namespace, opening, step=None if is_writer else 0)


# --- shares


@pytest.mark.parametrize(
    ("slots", "reserve", "writers", "readers"),
    [(1, 0, 1, 0), (2, 1, 1, 0), (7, 1, 6, 0), (8, 1, 5, 2), (32, 2, 22, 8), (64, 4, 44, 16)],
)
def test_readers_have_a_quarter_and_writers_the_rest_less_a_reserve(slots: int, reserve: int, writers: int, readers: int) -> None:
    assert reserve_of(slots) == reserve
    assert share_of(slots, is_writer=True) == writers
    assert share_of(slots, is_writer=False) == readers
    for is_writer in (True, False):
        assert share_of(slots, is_writer=is_writer, is_trainable=False) == slots - reserve, "one share for all"


@pytest.mark.parametrize("reader_slots", [None, 0, 1, 5, 1000])
def test_shares_and_reserve_are_all_slots_and_one_is_left_to_write_whatever_is_set(reader_slots: int | None) -> None:
    for slots in range(1, 100):
        writers, readers = (share_of(slots, is_writer=is_writer, reader_slots=reader_slots) for is_writer in (True, False))
        assert writers + readers + reserve_of(slots) == slots
        assert writers >= 1
        assert readers >= 0


# --- promises


def test_each_reader_gets_half_of_what_is_left_to_readers_and_the_last_ones_nothing() -> None:
    small = desk()
    assert [open_view(small, "read").lease_slots for _ in range(5)] == [4, 2, 1, 1, 0]
    assert open_view(small, "write").lease_slots == 22, "the writers' share was kept while nobody wrote"


def test_a_promise_stays_as_others_open_and_close_and_what_is_closed_is_promised_again() -> None:
    small = desk()
    writer, first = open_view(small, "write"), open_view(small, "read")
    second, third = open_view(small, "read"), open_view(small, "read")
    small.planner.views.close(first)
    assert [view.lease_slots for view in (writer, second, third)] == [22, 2, 1]
    assert open_view(small, "read").lease_slots == 2, "half of the five that are left"


def test_ranks_divide_the_writers_share() -> None:
    small = desk()
    first = open_view(small, "write", world_size=3)
    assert first.group is not None
    others = [small.planner.views.open_rank(small.namespace, first.group, rank) for rank in (1, 2)]
    assert [view.lease_slots for view in (first, *others)] == [7, 7, 7]


def test_in_an_inference_namespace_everybody_gets_half_of_what_is_left() -> None:
    small = opaque_desk()
    assert [open_view(small, mode).lease_slots for mode in ("read", "write", "read")] == [7, 4, 2]


def test_who_writes_after_another_is_promised_what_that_one_does_not_hold() -> None:
    small = desk()
    old = open_view(small, "write")
    held = small.leased(old, *KEYS[:5])
    assert open_view(small, "write").lease_slots == 17
    small.release(held)
    assert open_view(small, "write").lease_slots == 22


def test_a_reader_whose_session_is_gone_keeps_what_it_holds_and_no_more() -> None:
    small = desk()
    gone, also_gone = open_view(small, "read"), open_view(small, "read")
    small.leased(gone, KEYS[0])
    small.leased(also_gone, KEYS[0], KEYS[1])
    for view in (gone, also_gone):
        small.planner.views.end_writing(view)
    assert open_view(small, "read").lease_slots == 3, "half of six: they hold the same copy of one key"


@pytest.mark.parametrize(("least", "promised"), [(0, 4), (3, 4), (5, 5), (8, 8)])
def test_a_reader_gets_what_it_needs_at_least_up_to_all_that_is_left(least: int, promised: int) -> None:
    assert open_view(desk(), "read", least=least).lease_slots == promised


@pytest.mark.parametrize(("least", "most", "promised"), [(0, 3, 3), (0, 0, 0), (0, -7, 0), (0, 5, 4), (6, 6, 6), (3, 1, 3)])
def test_a_reader_gets_no_more_than_it_wants_unless_it_asks_for_more_at_least(least: int, most: int, promised: int) -> None:
    assert open_view(desk(), "read", least=least, most=most).lease_slots == promised


def test_readers_who_name_what_they_want_leave_the_rest_to_each_other() -> None:
    small = SmallPlanner(experts=64, param_slots=68, extents=96, schema=OPAQUE)
    assert [open_view(small, "read", least=16, most=16).lease_slots for _ in range(4)] == [16] * 4
    with pytest.raises(CapacityError, match="min_lease_slots=1, but 0 of its 68 slots are left"):
        open_view(small, "read", least=1)


def test_the_refusal_names_no_way_that_cannot_help() -> None:
    small = desk(param_slots=16)
    open_view(small, "read", least=4)
    with pytest.raises(CapacityError, match=r"0 of its 16 .* promised 4; close one, raise reader_slots, or raise host_budget"):
        open_view(small, "read", least=1)
    with pytest.raises(CapacityError, match=r"11 of its 16 .* promised 4; close one, ask for less, or raise host_budget"):
        open_view(small, "write", least=12)
    opaque = opaque_desk()
    open_view(opaque, "read", least=14)
    with pytest.raises(CapacityError, match=r"1 of its 16 .* promised 14; close one, ask for less, or raise host_budget"):
        open_view(opaque, "read", least=2)


def test_more_than_is_left_is_refused_with_who_has_it_and_nothing_changes() -> None:
    small = desk()
    reader, writer = open_view(small, "read", least=6), open_view(small, "write")
    before = small.picture()
    with pytest.raises(CapacityError, match=r"min_lease_slots=3, but 2 of its 32 slots are left for a reader: a writer was"):
        open_view(small, "read", least=3)
    with pytest.raises(CapacityError, match="min_lease_slots=23, but 22 of its 32 slots are left for a writer: "):
        open_view(small, "write", least=23)
    with pytest.raises(CapacityError, match="min_lease_slots=12, but 11 of"):
        open_view(small, "write", least=12, world_size=2)
    assert small.picture() == before
    assert (reader.lease_slots, writer.lease_slots, writer.is_fenced) == (6, 22, False)
    assert open_view(small, "write", least=22).lease_slots == 22


def test_a_setting_of_reader_slots_is_what_readers_share() -> None:
    small = desk()
    assert promise(small.namespace, Opening(), reader_slots=20) == 10
    assert promise(small.namespace, Opening(WriterGroup()), reader_slots=20) == 10
    assert promise(small.namespace, Opening(WriterGroup()), reader_slots=0) == 30


# --- naming


def test_holders_are_named_with_the_most_first_and_not_without_end() -> None:
    small = desk()
    assert holders(small.namespace) == "nobody keeps any"
    views = [open_view(small, "read", least=1) for _ in range(3)]
    old = open_view(small, "write")
    small.leased(old, *KEYS[:3])
    open_view(small, "write")
    assert holders(small.namespace) == (
        "a writer was promised 19, a reader was promised 4, a writer still holds 3, a reader was promised 2, "
        "a reader was promised 1"
    )
    for view, slots in zip(views, (2, 2, 2), strict=True):
        view.lease_slots = slots
    for _ in range(4):
        small.namespace.views.append(View(small.namespace, is_writer=False, step=0, lease_slots=1))
    assert holders(small.namespace).endswith("a reader was promised 1, 3 others keep 3")


def test_the_slots_that_promise_every_key_are_the_fewest() -> None:
    for keys in range(1, 400):
        most, fewer = (share_of(slots_promising(keys) - less, is_writer=False, is_trainable=False) for less in (0, 1))
        assert most >= keys > fewer
