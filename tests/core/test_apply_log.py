"""A log knows which steps lie between two applies, and no more of them than a record may miss."""

from __future__ import annotations

import pytest

from paramstore.core.apply_log import MISSED_MAX, ApplyLog
from paramstore.core.optimizers import AdamW


def log_of(count: int) -> ApplyLog:
    """Of applies 1 to `count`; the rate of each is its number, its epoch a tenth of that."""
    log = ApplyLog()
    for number in range(1, count + 1):
        log = log.appended(number // 10, AdamW(lr=number))
    return log


def rates(log: ApplyLog, *, after: int, until: int) -> list[float]:
    return [options.lr for options in log.missed(after=after, until=until)]


def test_what_was_missed_are_the_applies_after_one_up_to_another() -> None:
    log = log_of(5)
    assert rates(log, after=2, until=5) == [3, 4, 5]
    assert rates(log, after=0, until=1) == [1]
    assert rates(log, after=4, until=4) == rates(ApplyLog(), after=0, until=0) == []
    assert (log.last, ApplyLog().last) == (5, 0)


def test_each_apply_keeps_the_epoch_in_which_it_was_made() -> None:
    log = log_of(25).trimmed(20)
    assert [log.epoch_of(number) for number in (1, 9, 10, 25)] == [0, 0, 1, 2]


def test_a_window_has_what_records_of_that_moment_may_miss_and_nothing_later() -> None:
    log = log_of(MISSED_MAX + 10)
    window = log.window(MISSED_MAX + 4)
    assert (window.first, window.last, len(window.entries)) == (5, MISSED_MAX + 4, MISSED_MAX)
    assert rates(window, after=4, until=6) == [5, 6]
    assert log.window(3).last == 3


def test_trimming_keeps_what_was_called_since() -> None:
    log = log_of(MISSED_MAX + 10).trimmed(MISSED_MAX + 4)
    assert (log.first, log.last) == (5, MISSED_MAX + 10)
    assert log.trimmed(MISSED_MAX + 4) == log


@pytest.mark.parametrize(("after", "until"), [(0, 9), (8, 11)])
def test_what_a_log_does_not_have_is_a_bug_to_ask_for(after: int, until: int) -> None:
    log = ApplyLog(5, log_of(6).entries)  # 5 to 10
    with pytest.raises(AssertionError, match="of a log of 5 to 10"):
        log.missed(after=after, until=until)
