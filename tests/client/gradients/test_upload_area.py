from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import paramstore_client as ps
from paramstore.memory.pages import SEGMENT_ALIGNMENT_BYTES
from paramstore.wire import messages as m
from paramstore_client.gradients.upload_area import Range, UploadArea
from paramstore_testkit.wire.fake_daemon import FakeDaemon

SEGMENT = SEGMENT_ALIGNMENT_BYTES
"""The least the daemon gives."""
MOST = 1 << 30


@pytest.fixture
def area(store: ps.Store) -> UploadArea:
    return store._area


def test_ranges_are_page_aligned_and_apart(area: UploadArea) -> None:
    ranges = area.take(5, 5000, most_bytes=MOST)
    assert [place.offset_bytes for place in ranges] == [number * 8192 for number in range(5)]
    assert {place.length_bytes for place in ranges} == {8192}


def test_returned_ranges_are_taken_again_without_asking_the_daemon(daemon: FakeDaemon, area: UploadArea) -> None:
    taken = area.take(4, SEGMENT // 4, most_bytes=MOST)
    area.give_back(taken)
    assert sorted(area.take(4, SEGMENT // 4, most_bytes=MOST)) == sorted(taken)
    assert len(daemon.requests(m.OpenUpload)) == 1


def test_neighbours_that_come_back_make_one_hole(daemon: FakeDaemon, area: UploadArea) -> None:
    taken = area.take(4, SEGMENT // 4, most_bytes=MOST)
    area.give_back([taken[2]])
    area.give_back([taken[0], taken[1], taken[3]])
    assert area.take(1, SEGMENT, most_bytes=MOST) == [Range(taken[0].segment, 0, SEGMENT)]
    assert len(daemon.requests(m.OpenUpload)) == 1


def test_area_doubles_up_to_what_will_be_needed_at_most(daemon: FakeDaemon, area: UploadArea) -> None:
    for _ in range(7):
        area.take(1, SEGMENT, most_bytes=6 * SEGMENT)
    asked = [request.size_bytes // SEGMENT for request in daemon.requests(m.OpenUpload)]
    assert asked == [1, 1, 2, 2, 1]


def test_area_takes_just_what_is_missing_when_more_is_refused(daemon: FakeDaemon, area: UploadArea) -> None:
    daemon.upload_budget_bytes = 3 * SEGMENT
    taken = area.take(2, SEGMENT, most_bytes=MOST) + area.take(1, SEGMENT, most_bytes=MOST)
    assert len(set(taken)) == 3
    assert [request.size_bytes // SEGMENT for request in daemon.requests(m.OpenUpload)] == [2, 2, 1]


def test_refused_growth_takes_nothing(daemon: FakeDaemon, area: UploadArea) -> None:
    daemon.upload_budget_bytes = 2 * SEGMENT
    area.give_back(area.take(2, SEGMENT, most_bytes=2 * SEGMENT))
    with pytest.raises(ps.CapacityError, match="--gradient-budget"):
        area.take(3, SEGMENT, most_bytes=MOST)
    assert area.free_bytes() == 2 * SEGMENT


def test_segment_that_comes_after_the_wait_was_given_up_is_used(daemon: FakeDaemon, area: UploadArea, store: ps.Store) -> None:
    daemon.hold(m.OpenUpload)
    store._connection.timeout_s = 0.01
    with pytest.raises(ps.WaitTimeout):
        area.take(1, SEGMENT, most_bytes=MOST)
    store._connection.timeout_s = 5.0
    daemon.let_go(m.OpenUpload)
    store.stats()
    assert len(area.take(1, SEGMENT, most_bytes=MOST)) == 1
    assert len(daemon.requests(m.OpenUpload)) == 1


def test_threads_never_get_the_same_range(area: UploadArea) -> None:
    taken: list[Range] = []

    def run() -> None:
        for _ in range(50):
            taken.extend(area.take(2, 4096, most_bytes=MOST))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(taken) == len(set(taken)) == 400


def test_what_is_given_back_within_a_giving_back_is_given_back_once(area: UploadArea) -> None:
    """As where a signal's handler closes the store in between."""

    class Interrupted(dict[int, Range]):
        def __iter__(self) -> Iterator[int]:
            yield from list(self.keys())
            area.give_back([self.pop(0)])

    area.give_back_all(Interrupted(enumerate(area.take(2, SEGMENT // 2, most_bytes=MOST))))
    assert area.free_bytes() == SEGMENT
