"""Decayed counts rank what a layer is likely to use."""

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
