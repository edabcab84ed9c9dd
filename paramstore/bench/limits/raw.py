"""The limit of the disk: a thread pool that reads and overwrites whole records with O_DIRECT, and nothing else.

The baseline is the best that a process can do without a service: plans are made before the clock starts, threads and memory
are warm, pieces are large, content does not compress, writes go to blocks that were written before and end in one flush.
Peers implement `RecordStore` beside it, so that the same code takes the samples of all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from paramstore.bench.limits.pages import Slab
from paramstore.bench.pairs import Sample
from paramstore.bench.process import cpu_s
from paramstore.clock import Clock, MonotonicClock
from paramstore.errors import VolumeError

THREADS = 4
PIECE_BYTES = 8 << 20
ALIGNMENT_BYTES = 4096

Piece = tuple[int, memoryview]
"""Offset in the file, and the memory that it is read into or written from."""


class RecordStore(Protocol):
    """Records of equal size, numbered from 0, that can be read and overwritten as a whole."""

    @property
    def name(self) -> str: ...

    def read(self, order: Sequence[int]) -> Sample:
        """Reads these records into memory of the process, cold: nothing of them is in the page cache."""
        ...

    def write(self, order: Sequence[int]) -> Sample:
        """Overwrites these records; they are durable on return. The sample's parts have `flush_s` if the flush is one call."""
        ...

    def close(self) -> None: ...


class RawFile:
    """Record i lies at i * record_bytes, in the file at `path` and in `slab`.

    Owner of its threads and its descriptor; the slab is the caller's.
    """

    def __init__(
        self, path: Path, slab: Slab, *, record_bytes: int, record_count: int, clock: Clock | None = None
    ) -> None:
        assert record_bytes % ALIGNMENT_BYTES == 0
        assert record_bytes * record_count <= slab.length_bytes
        self.name = f"raw, {slab.kind}"
        self.slab = slab
        self.record_bytes = record_bytes
        self.record_count = record_count
        self.clock = clock or MonotonicClock()
        self._fd = _open_direct(path)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="bench-raw")
        if os.fstat(self._fd).st_size < record_bytes * record_count:
            self._create()

    def read(self, order: Sequence[int]) -> Sample:
        return self._timed(order, os.preadv, is_flushed=False)

    def write(self, order: Sequence[int], *, after: Sequence[Piece] = ()) -> Sample:
        """Overwrites these records. after: pieces that the caller's thread then writes, one by one, before the flush."""
        return self._timed(order, os.pwritev, is_flushed=True, after=after)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)

    def _timed(
        self, order: Sequence[int], call: Callable[[int, list[memoryview], int], int], *, is_flushed: bool,
        after: Sequence[Piece] = (),
    ) -> Sample:  # fmt: skip
        pieces = [piece for record in order for piece in self._pieces(record)]
        cpu_before_s, started_s = cpu_s(os.getpid()), self.clock.now_s()
        self._move(pieces, call)
        for offset, memory in after:
            call(self._fd, [memory], offset)
        moved_s = self.clock.now_s()
        if is_flushed:
            os.fdatasync(self._fd)
        ended_s = self.clock.now_s()
        used_s = cpu_s(os.getpid()) - cpu_before_s
        parts = {"flush_s": ended_s - moved_s} if is_flushed else {}
        return Sample(len(order) * self.record_bytes, ended_s - started_s, used_s, parts)

    def _pieces(self, record: int) -> list[Piece]:
        start, end = record * self.record_bytes, (record + 1) * self.record_bytes
        return [(at, self.slab.view[at : min(at + PIECE_BYTES, end)]) for at in range(start, end, PIECE_BYTES)]

    def _move(self, pieces: list[Piece], call: Callable[[int, list[memoryview], int], int]) -> None:
        """Moves the pieces on all threads; each takes the next one from one list iterator, which is safe to share."""
        shared = iter(pieces)

        def work() -> None:
            for offset, memory in shared:
                moved = call(self._fd, [memory], offset)
                if moved != len(memory):
                    raise VolumeError(f"raw baseline: {moved} of {len(memory)} bytes moved at offset {offset}")

        for future in [self._pool.submit(work) for _ in range(THREADS)]:
            future.result()

    def _create(self) -> None:
        fill_incompressible(self.slab.view)
        self._move([piece for record in range(self.record_count) for piece in self._pieces(record)], os.pwritev)
        os.fsync(self._fd)


def fill_incompressible(memory: memoryview, *, seed: int = 7) -> None:
    """Fills `memory` (a multiple of 8 bytes) with random bytes; constant ones read faster than any real record."""
    words = np.frombuffer(memory, dtype=np.uint64)
    generator = np.random.Generator(np.random.SFC64(seed))
    step = PIECE_BYTES // 8
    for start in range(0, len(words), step):
        part = words[start : start + step]
        part[:] = generator.integers(0, 1 << 64, size=len(part), dtype=np.uint64)


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise VolumeError(f"{path}: its file system refuses O_DIRECT ({error}); choose another with --dir") from error
