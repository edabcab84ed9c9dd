"""A clock that moves only when a test says so."""

from __future__ import annotations


class ManualClock:
    """A `Clock` whose time is the sum of what it was advanced, from 0 on."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Lets time pass; it never goes back."""
        assert seconds >= 0
        self._now_s += seconds
