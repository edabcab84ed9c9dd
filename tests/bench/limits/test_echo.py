"""The bare round trip."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore.bench.limits.echo import Echo, time_calls
from paramstore.testing.clock import ManualClock


def test_each_call_is_timed_by_itself() -> None:
    clock = ManualClock()
    assert time_calls(lambda: clock.advance(0.25), 3, clock) == [0.25, 0.25, 0.25]


@pytest.mark.slow
def test_echo_answers_every_acquire(tmp_path: Path) -> None:
    echo = Echo(tmp_path / "echo", key_count=64)
    try:
        for _ in range(50):
            echo.acquire_and_release()
    finally:
        echo.close()
