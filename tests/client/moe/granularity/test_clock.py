"""Laps are counted to the pass they are of, and to computing where they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paramstore_client.moe.granularity import clock
from paramstore_client.moe.granularity.clock import Clock, Times


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> None:
    times: Iterator[int] = iter([0, 1, 2, 4, 7, 100, 101, 104, 105])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(times)))


@pytest.mark.usefixtures("marks")
def test_a_call_has_the_times_of_its_laps() -> None:
    ended: list[Clock] = []
    watch = Clock(torch.device("cpu"))
    watch.ended = ended.append
    watch.begin()
    watch.lap()
    watch.skip()
    watch.lap(is_computing=True)
    watch.lap()
    watch.begin(is_backward=True)
    watch.lap()
    watch.lap(is_computing=True)
    watch.end()
    assert ended == [watch]
    assert watch.times() == Times(6.0, 2.0, 5.0, 3.0)
    assert watch.times().seconds == 11.0


def test_times_are_told_in_whole_microseconds() -> None:
    times = Times(0.5, 0.25, 1.0, 0.000001)
    assert Times.of_microseconds(times.microseconds) == times
