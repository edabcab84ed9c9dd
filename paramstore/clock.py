"""Clocks, from which every other module takes the time. Correctness never depends on wall-clock time; deadlines use `now_s`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds. Tests use `paramstore.testing.clock.ManualClock`."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes backwards."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()
