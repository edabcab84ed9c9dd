"""Decayed counts rank what a layer is likely to use."""

import sys
import threading

from paramstore_client.activity import Activity


def test_the_most_used_come_first_and_ties_go_to_the_lower_expert() -> None:
    activity = Activity()
    for experts in ([5, 2], [5, 1], [3, 1, 0]):
        activity.record(0, experts)
    assert activity.likely(0, 8) == (1, 0, 3, 5, 2)
    assert activity.likely(0, 2) == (1, 0)


def test_nothing_is_likely_before_the_first_visit_or_without_room() -> None:
    activity = Activity()
    assert activity.likely(0, 8) == ()
    activity.record(1, [4])
    assert activity.likely(0, 8) == ()
    assert activity.likely(1, -1) == ()


def test_use_added_to_a_visit_decays_nothing() -> None:
    activity = Activity()
    activity.record(0, [1])
    activity.add(0, [2])
    assert activity.likely(0, 8) == (1, 2)


def test_what_is_long_unused_is_forgotten() -> None:
    activity = Activity()
    activity.record(0, [1])
    for _ in range(10):
        activity.record(0, [2])
    assert activity.likely(0, 8) == (2,)


def test_threads_that_count_at_once_fail_neither() -> None:
    """A model may compute on several threads, and hints fail none of them."""
    activity, errors = Activity(), list[BaseException]()

    def count(thread: int) -> None:
        try:
            for first in range(thread * 10_000, thread * 10_000 + 500):  # always others: the size of the counts changes
                activity.record(0, range(first, first + 256))
                assert activity.likely(0, 4)
        except BaseException as error:  # noqa: BLE001 - for the test's own thread
            errors.append(error)

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=count, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before_s)
    assert errors == []
