"""A daemon whose volumes read no faster than a given rate: a slower disk than the machine has, on any file system.

`python -m paramstore_bench.guesses.slow_volume BYTES_PER_S VOLUME ARGUMENTS` is `python -m paramstore serve ARGUMENTS` with that
limit for one volume, or for all: the reads of all workers share one line, in the order in which they begin, and each ends no
earlier than its bytes have passed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from paramstore.__main__ import main as run
from paramstore.storage.volume.file_volume import FileVolume
from paramstore_client.connection import autostart


class ReadRate:
    """A line of `bytes_per_s`, for threads. Owner of the time at which it is free."""

    def __init__(
        self, bytes_per_s: float, *, now_s: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._now_s, self._sleep = now_s, sleep
        self._free_s = 0.0
        self._lock = threading.Lock()

    def reading(self, length_bytes: int, read: Callable[[], None]) -> None:
        """Calls `read`, and returns when so many bytes have passed the line, behind those that were here before."""
        with self._lock:
            self._free_s = max(self._free_s, self._now_s()) + length_bytes / self._bytes_per_s
            ends_s = self._free_s
        read()
        if (left_s := ends_s - self._now_s()) > 0:
            self._sleep(left_s)


@contextmanager
def reading_at(bytes_per_s: float | None, *, volume: int | None = None) -> Iterator[None]:
    """Daemons that this process starts in the block read at most so fast, from one volume or all; None for no limit."""
    command = autostart.SERVE_COMMAND
    if bytes_per_s is not None:
        words = str(bytes_per_s), "all" if volume is None else str(volume)
        autostart.SERVE_COMMAND = (sys.executable, "-m", "paramstore_bench.guesses.slow_volume", *words)
    try:
        yield
    finally:
        autostart.SERVE_COMMAND = command


def main() -> None:
    rate, slowed, read = ReadRate(float(sys.argv[1])), sys.argv[2], FileVolume.read

    def slow(volume: FileVolume, offset_bytes: int, into: Sequence[memoryview]) -> None:
        if slowed in ("all", str(volume.index)):
            rate.reading(sum(view.nbytes for view in into), lambda: read(volume, offset_bytes, into))
        else:
            read(volume, offset_bytes, into)

    FileVolume.read = slow  # type: ignore[method-assign,assignment]
    sys.argv = ["paramstore", "serve", *sys.argv[3:]]
    run()


if __name__ == "__main__":
    main()
