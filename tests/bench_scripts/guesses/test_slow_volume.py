"""The line that reads of a slow volume share: as fast as its rate for all together, and no slower than a slower disk."""

from __future__ import annotations

from paramstore_bench.guesses.slow_volume import ReadRate, reading_at
from paramstore_client.connection import autostart


class Watch:
    """A clock that stands still but for sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    def rate(self, bytes_per_s: float) -> ReadRate:
        return ReadRate(bytes_per_s, now_s=lambda: self.now_s, sleep=self.sleep)


def test_reads_one_after_the_other_take_their_bytes_time() -> None:
    watch, read = Watch(), list[int]()
    rate = watch.rate(1000.0)
    for length in (500, 250):
        rate.reading(length, lambda length=length: read.append(length))  # type: ignore[misc]
    assert (read, watch.slept) == ([500, 250], [0.5, 0.25])


def test_reads_beside_each_other_share_the_line() -> None:
    watch = Watch()
    rate = watch.rate(1000.0)
    rate.reading(500, lambda: rate.reading(500, lambda: None))
    assert watch.slept == [1.0], "the second one waits for both, and the first one is over by then"


def test_a_disk_that_is_slower_is_not_held_up() -> None:
    watch = Watch()

    def slow() -> None:
        watch.now_s += 2.0

    watch.rate(1000.0).reading(500, slow)
    assert watch.slept == []


def test_daemons_of_the_block_alone_are_slow() -> None:
    before = autostart.SERVE_COMMAND
    with reading_at(5e8):
        assert autostart.SERVE_COMMAND[1:] == ("-m", "paramstore_bench.guesses.slow_volume", "500000000.0", "all")
    with reading_at(5e8, volume=1):
        assert autostart.SERVE_COMMAND[-1] == "1"
    with reading_at(None):
        assert before == autostart.SERVE_COMMAND
