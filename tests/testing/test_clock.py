"""The clock of the tests."""

from __future__ import annotations

import pytest

from paramstore.clock import Clock
from paramstore.testing.clock import ManualClock


def test_time_passes_only_when_advanced() -> None:
    manual = ManualClock()
    clock: Clock = manual
    start_s = clock.now_s()
    assert clock.now_s() == start_s
    manual.advance(1.5)
    assert clock.now_s() == start_s + 1.5


def test_time_never_goes_back() -> None:
    with pytest.raises(AssertionError):
        ManualClock().advance(-1.0)
