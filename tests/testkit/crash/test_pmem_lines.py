"""The simulated module is a volume like any other, and its crash states are what caches may do."""

from __future__ import annotations

import random
import threading

import pytest

from paramstore.testing.volume_contract import VolumeContract
from paramstore.testing.volumes import page_aligned
from paramstore_native.libpmem2 import NO_DRAIN, NO_FLUSH
from paramstore_testkit.crash.pmem_lines import LINE_BYTES, WORD_BYTES, LineDisk, Pmem
from paramstore_testkit.disks.crash_disk import SMALL, State
from paramstore_testkit.disks.journal import Journal, Persisted, Wrote

SIZE_BYTES = 8 << 20
PAGE = 4096


@pytest.fixture(params=["page", "cache_line", "byte"])
def volume(request: pytest.FixtureRequest) -> object:
    return Pmem(0, Journal(), granularity=request.param, size_bytes=SIZE_BYTES).volume()


class TestSimulatedPmem(VolumeContract):
    """The fixture is the module's."""


def pmem(granularity: str = "cache_line") -> tuple[Pmem, Journal]:
    journal = Journal()
    return Pmem(0, journal, granularity=granularity, size_bytes=4 * PAGE), journal


def after(journal: Journal) -> LineDisk:
    """The media after all that happened."""
    disk = LineDisk.blank(volume_count=1, volume_bytes=4 * PAGE)
    for event in journal.events:
        disk.advance(event)
    return disk


def test_a_copy_persists_line_by_line_only_when_it_was_flushed_and_waited_for() -> None:
    data = page_aligned(PAGE, seed=1)
    for flags, is_durable in ((0, True), (NO_DRAIN, False), (NO_FLUSH, False)):
        media, journal = pmem()
        media.copy_and_persist(PAGE, data, flags)
        assert (bytes(after(journal).durable[0][PAGE : 2 * PAGE]) == bytes(data)) is is_durable


def test_a_drain_covers_the_flushes_of_its_own_thread_alone() -> None:
    media, journal = pmem()
    thread = threading.Thread(target=media.copy_and_persist, args=(0, page_aligned(PAGE, seed=1), NO_DRAIN))
    thread.start()
    thread.join()
    media.copy_and_persist(PAGE, page_aligned(PAGE, seed=2), 0)
    assert [event for event in journal.events if isinstance(event, Persisted)] == [Persisted(0, PAGE, PAGE)]


def test_a_persist_covers_whole_lines_and_leaves_the_others_in_doubt() -> None:
    media, journal = pmem()
    data = page_aligned(PAGE, seed=3)
    media.copy(0, data)
    media.flush_lines(100, 30)
    media.drain()
    disk = after(journal)
    assert bytes(disk.durable[0][:PAGE]) == bytes(64) + bytes(data[64:192]) + bytes(PAGE - 192)
    assert [(edit.edit.offset_bytes, len(edit.edit.data)) for edit in disk.pending] == [(0, 64), (192, PAGE - 192)]


def test_of_two_stores_to_a_line_the_newer_one_persists() -> None:
    media, journal = pmem()
    media.copy(0, page_aligned(PAGE, seed=4))
    media.copy(0, memoryview(b"n" * PAGE))
    media.flush_lines(0, LINE_BYTES)
    media.drain()
    disk = after(journal)
    assert bytes(disk.durable[0][:LINE_BYTES]) == b"n" * LINE_BYTES
    assert len(disk.pending) == 2


def test_a_flush_of_the_file_settles_everything() -> None:
    media, journal = pmem("page")
    volume = media.volume()
    volume.write(0, [page_aligned(2 * PAGE, seed=5)])
    assert after(journal).pending
    volume.flush()
    disk = after(journal)
    assert disk.pending == []
    assert bytes(disk.durable[0]) == bytes(media.image)


def states() -> list[State]:
    """Of one page that was stored and not persisted."""
    disk = LineDisk.blank(volume_count=1, volume_bytes=4 * PAGE)
    event = Wrote(0, PAGE, bytes(page_aligned(PAGE, seed=6)))
    disk.advance(event)
    return list(disk.states(event, random.Random(7), SMALL))


def test_every_line_of_a_store_is_lost_kept_and_torn_once() -> None:
    found = states()
    lines = set(range(PAGE, 2 * PAGE, LINE_BYTES))
    assert {state.edits[0].offset_bytes for state in found if state.kind == "one line kept"} == lines
    lost = [lines - {at for edit in state.edits for at in covered(edit.offset_bytes, len(edit.data), LINE_BYTES)}
            for state in found if state.kind == "one line lost"]  # fmt: skip
    assert sorted(lost, key=min) == [{line} for line in sorted(lines)]
    torn = [state.edits for state in found if state.kind == "one line torn, others lost"]
    assert len(torn) == len(lines)
    for edits in torn:
        assert 0 < len(edits) < LINE_BYTES // WORD_BYTES
        assert len({edit.offset_bytes // LINE_BYTES for edit in edits}) == 1
        assert all(edit.offset_bytes % WORD_BYTES == 0 and len(edit.data) == WORD_BYTES for edit in edits)


def test_states_hold_what_was_stored_and_nothing_else() -> None:
    data = bytes(page_aligned(PAGE, seed=6))
    for state in states():
        for edit in state.edits:
            start = edit.offset_bytes - PAGE
            assert bytes(edit.data) == data[start : start + len(edit.data)], state.kind


def test_what_has_persisted_is_in_no_state() -> None:
    media, journal = pmem()
    media.copy_and_persist(0, page_aligned(PAGE, seed=8), 0)
    disk = after(journal)
    assert [state.kind for state in disk.states(journal.events[-1], random.Random(9), SMALL)] == ["none kept"]


def covered(offset_bytes: int, length_bytes: int, grain_bytes: int) -> range:
    return range(offset_bytes, offset_bytes + length_bytes, grain_bytes)
