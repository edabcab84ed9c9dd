"""Where a key's newest bytes are, what a view sees of it, and which steps are held."""

from __future__ import annotations

from paramstore.core.location import Extent, Identity, Located
from paramstore.engine.tables.apply import GradientRange
from paramstore_testkit.disks.machine import PlainSegment
from paramstore_testkit.stores.small_planner import SmallPlanner

A, B, C, D = ((0, expert) for expert in range(4))


def test_the_working_location_is_the_uncommitted_extent_else_the_committed_one() -> None:
    small = SmallPlanner()
    namespace = small.namespace
    committed = namespace.steps.ledger.at(A, 0)
    assert namespace.on_volume(A) == committed
    newer = Located(Extent(0, 1 << 20, 4096), Identity(1, 1), 5)
    namespace.residency.working[A].uncommitted = newer
    assert namespace.on_volume(A) == newer
    assert namespace.on_volume(B) == namespace.steps.ledger.at(B, 0)


def test_a_key_without_any_record_has_no_on_volume() -> None:
    small = SmallPlanner(is_committed=False)
    assert small.namespace.steps.committed_step is None
    assert small.namespace.on_volume(A) is None


def test_the_writer_sees_what_applies_will_make_and_a_reader_its_step() -> None:
    small = SmallPlanner()
    writer, reader = small.writer(), small.reader()
    small.begin_apply(A)
    assert writer.locate(A) == ((1, 1), None), "no extent: the working copy has it, or will"
    located = small.namespace.steps.ledger.at(A, 0)
    assert located is not None
    assert reader.locate(A) == (located.identity, located)
    assert small.reader(step=-1).locate(A) == (None, None)


def test_bytes_are_seen_by_the_writer_or_by_a_reader_of_their_step() -> None:
    small = SmallPlanner(param_slots=6)
    small.writer()
    reader = small.reader()
    small.update(A)
    namespace = small.namespace
    assert namespace.is_seen(A, Identity(1, 1))
    assert namespace.is_seen(A, Identity(1, 0))
    assert not namespace.is_seen(A, Identity(2, 0))
    small.planner.views.close(reader)
    assert not namespace.is_seen(A, Identity(1, 0))


def test_held_steps_are_those_of_open_readers_that_kept_their_step() -> None:
    small = SmallPlanner()
    small.writer()
    first, second, third = small.reader(), small.reader(), small.reader()
    second.step, third.step = 5, 9
    assert set(small.namespace.held_steps()) == {0, 5, 9}
    second.is_dropped = True
    small.planner.views.close(third)
    assert set(small.namespace.held_steps()) == {0}
    assert first.step == 0


def test_a_namespace_protects_what_any_of_its_views_wishes() -> None:
    small = SmallPlanner()
    one, other = small.reader(), small.reader()
    assert small.namespace.protected == frozenset()
    one.protected, other.protected = frozenset({A, B}), frozenset({B, C})
    assert small.namespace.protected == {A, B, C}
    small.planner.views.close(one)
    assert small.namespace.protected == {B, C}


def test_the_copy_of_an_identity_is_found_among_all_of_its_key() -> None:
    small = SmallPlanner(param_slots=6)
    writer, reader = small.writer(), small.reader()
    small.update(A)
    newer, older = small.leased(writer, A).copies[0], small.leased(reader, A).copies[0]
    find = small.namespace.residency.find_copy
    assert find(A, Identity(1, 0)) is older
    assert find(A, Identity(1, 1)) is newer
    assert find(A, Identity(2, 1)) is None
    assert find(B, Identity(1, 0)) is None


def test_a_writer_whose_connection_ended_writes_no_more_but_keeps_its_leases() -> None:
    small = SmallPlanner()
    view = small.writer()
    held = small.leased(view, A)
    small.namespace.writing.pending[A] = (GradientRange(PlainSegment(4096), 0, 4096),)
    small.planner.views.end_writing(view)
    assert view.is_fenced
    assert small.namespace.writing.writer is None
    assert not small.namespace.writing.pending
    assert held.copies[0].leases == 1


def test_the_end_of_a_fenced_writer_takes_nothing_from_the_one_after_it() -> None:
    small = SmallPlanner()
    old, new = small.writer(), small.writer()
    small.namespace.writing.pending[A] = (GradientRange(PlainSegment(4096), 0, 4096),)
    small.planner.views.end_writing(old)
    small.planner.views.close(old)
    assert small.namespace.writing.writer is new
    assert A in small.namespace.writing.pending


def test_a_gradient_range_is_a_window_on_its_upload_area() -> None:
    memory = PlainSegment(8192)
    memory.view(4096, 4096)[:] = b"\x07" * 4096
    window = GradientRange(memory, 4096, 100).view()
    assert bytes(window) == b"\x07" * 100
    window[0] = 9
    assert memory.view(4096, 1)[0] == 9
