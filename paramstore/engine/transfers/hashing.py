"""Lets only a few workers hash at a time, and hashes beside a worker that still reads.

Reads that were queued together end together. If all their workers hash at once, they release the interpreter's lock and want it
back every 30 us, and two cores that stream from memory slow each other down: on two cores, one worker at a time needs a quarter
less CPU for the same bytes (35 instead of 46 ms/GB, eight threads of 8 MiB, xxh3 at 37 GB/s a core).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from paramstore.core.checksums import device_sums
from paramstore.core.schema import Chunk
from paramstore.storage.format.structures import chunk_checksums
from paramstore.turns import Turns


class Hashing:
    """Computes checksums for workers, in turns. A turn lasts for one piece, so the number of workers bounds the wait for it."""

    def __init__(self, at_once: int) -> None:
        """at_once: how many may hash at the same time, 1 or more."""
        self._turns = Turns(at_once)
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="paramstore-hashing")
        """Those that hash for workers which go on; made when they are needed, and gone with this object."""

    def checksums(self, image: memoryview, chunks: Sequence[Chunk], base_bytes: int = 0) -> list[int]:
        """Waits for a turn, then returns what `storage.format.structures.chunk_checksums` does."""
        with self._turns:
            return chunk_checksums(image, chunks, base_bytes)

    def device_sums(self, image: memoryview, chunks: Sequence[Chunk], base_bytes: int = 0) -> list[int]:
        """Waits for a turn, then returns what `core.checksums.device_sums` does."""
        with self._turns:
            return device_sums(image, chunks, base_bytes)

    @contextmanager
    def beside(
        self, image: memoryview, chunks: Sequence[Chunk], base_bytes: int = 0
    ) -> Iterator[Callable[[], list[int]]]:
        """Computes what `checksums` does in another thread, while the block runs; gives what waits for it, and returns it. `image`
        is in nobody's use once the block has ended, however it ends."""
        hashed = self._threads.submit(self.checksums, image, chunks, base_bytes)
        try:
            yield hashed.result
        finally:
            hashed.exception()
