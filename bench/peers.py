"""The peers: what people use today to keep records on a disk, behind the `RecordStore` protocol, called as their users would.

All go through the page cache; it is dropped for their files before each read, outside the timing. Writes end durable.
Content is the caller's slab: incompressible bytes, record i at i * record_bytes. Loads that can fill given memory fill the
slab; torch.load makes new tensors, as it always does; safetensors maps the file, so what it loads is copied to be read.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiofiles
import lmdb
import numpy as np
import safetensors.torch
import torch

from paramstore.bench.limits.pages import Slab
from paramstore.bench.pairs import Sample
from paramstore.bench.process import cpu_s
from paramstore.clock import MonotonicClock

CONCURRENT_FILES = 4
CLOCK = MonotonicClock()


class FilePerRecord(ABC):
    """Base of the peers that keep one file a record. A subclass loads and saves them."""

    name = ""
    suffix = ""

    def __init__(self, directory: Path, slab: Slab, *, record_bytes: int, record_count: int) -> None:
        self._directory = directory
        self._record_bytes = record_bytes
        self._views = [slab.view[i * record_bytes : (i + 1) * record_bytes] for i in range(record_count)]
        self.write(range(record_count))

    @abstractmethod
    def load(self, order: Sequence[int]) -> None:
        """Reads these records into memory."""

    @abstractmethod
    def save(self, order: Sequence[int]) -> None:
        """Overwrites these records from the slab; `write` makes them durable."""

    def read(self, order: Sequence[int]) -> Sample:
        for record in order:
            drop_page_cache(self.path(record))
        return self.timed(order, lambda: self.load(order))

    def write(self, order: Sequence[int]) -> Sample:
        def save_all() -> None:
            self.save(order)
            for record in order:
                flush(self.path(record))

        return self.timed(order, save_all)

    def close(self) -> None:
        self._views.clear()
        for path in self._directory.glob(f"*{self.suffix}"):
            path.unlink()

    def path(self, record: int) -> Path:
        return self._directory / f"{record:04d}{self.suffix}"

    def tensor(self, record: int) -> torch.Tensor:
        return torch.frombuffer(self._views[record], dtype=torch.uint8)

    def timed(self, order: Sequence[int], work: Callable[[], object]) -> Sample:
        return timed(len(order) * self._record_bytes, work)


class Aiofiles(FilePerRecord):
    """aiofiles, four files at a time, unbuffered, read into and written from given memory."""

    name = "aiofiles, 4 at a time"
    suffix = ".bin"

    def __init__(self, directory: Path, slab: Slab, *, record_bytes: int, record_count: int) -> None:
        self._runner = asyncio.Runner()
        super().__init__(directory, slab, record_bytes=record_bytes, record_count=record_count)

    def load(self, order: Sequence[int]) -> None:
        self._runner.run(self._each(order, self._load))

    def save(self, order: Sequence[int]) -> None:
        self._runner.run(self._each(order, self._save))

    def close(self) -> None:
        self._runner.close()
        super().close()

    async def _each(self, order: Sequence[int], call: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        shared = iter(order)

        async def work() -> None:
            for record in shared:
                await call(record)

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENT_FILES):
                group.create_task(work())

    async def _load(self, record: int) -> None:
        view, done = self._views[record], 0
        async with aiofiles.open(self.path(record), "rb", buffering=0) as file:
            while done < len(view):
                done += await file.readinto(view[done:])

    async def _save(self, record: int) -> None:
        mode = "r+b" if self.path(record).exists() else "wb"
        async with aiofiles.open(self.path(record), mode, buffering=0) as file:
            await file.write(self._views[record])


class Safetensors(FilePerRecord):
    """safetensors.torch, one file a record."""

    name = "safetensors"
    suffix = ".safetensors"

    def load(self, order: Sequence[int]) -> None:
        for record in order:
            self.tensor(record).copy_(safetensors.torch.load_file(self.path(record))["record"])

    def save(self, order: Sequence[int]) -> None:
        for record in order:
            safetensors.torch.save_file({"record": self.tensor(record)}, self.path(record))


class TorchLoad(FilePerRecord):
    """torch.save and torch.load, one file a record."""

    name = "torch.load / torch.save"
    suffix = ".pt"

    def load(self, order: Sequence[int]) -> None:
        for record in order:
            torch.load(self.path(record), weights_only=True)

    def save(self, order: Sequence[int]) -> None:
        for record in order:
            torch.save(self.tensor(record), self.path(record))


class Lmdb:
    """Records as LMDB values; a read copies each out of the map, a write is one synced transaction for all."""

    name = "LMDB values"

    def __init__(self, directory: Path, slab: Slab, *, record_bytes: int, record_count: int) -> None:
        self._directory = directory / "lmdb"
        self._record_bytes = record_bytes
        self._views = [slab.view[i * record_bytes : (i + 1) * record_bytes] for i in range(record_count)]
        # Old pages are reused one transaction late, so two sets of values and some pages of the tree must fit.
        self._map_bytes = 3 * record_bytes * record_count + (64 << 20)
        self._environment = self._open()
        self.write(range(record_count))

    def read(self, order: Sequence[int]) -> Sample:
        self._environment.close()
        drop_page_cache(self._directory / "data.mdb")
        self._environment = self._open()
        return timed(len(order) * self._record_bytes, lambda: self._load(order))

    def write(self, order: Sequence[int]) -> Sample:
        return timed(len(order) * self._record_bytes, lambda: self._save(order))

    def close(self) -> None:
        self._views.clear()
        self._environment.close()
        for path in self._directory.iterdir():
            path.unlink()
        self._directory.rmdir()

    def _open(self) -> lmdb.Environment:
        return lmdb.open(str(self._directory), map_size=self._map_bytes)

    def _load(self, order: Sequence[int]) -> None:
        with self._environment.begin(buffers=True) as transaction:
            for record in order:
                value = transaction.get(_key(record))
                assert value is not None
                np.copyto(np.frombuffer(self._views[record], np.uint8), np.frombuffer(value, np.uint8))

    def _save(self, order: Sequence[int]) -> None:
        with self._environment.begin(write=True) as transaction:
            for record in order:
                transaction.put(_key(record), self._views[record])


PEERS: tuple[Callable[..., Any], ...] = (Aiofiles, Lmdb, Safetensors, TorchLoad)


def timed(work_bytes: int, work: Callable[[], object]) -> Sample:
    cpu_before_s, started_s = cpu_s(os.getpid()), CLOCK.now_s()
    work()
    return Sample(work_bytes, CLOCK.now_s() - started_s, cpu_s(os.getpid()) - cpu_before_s)


def drop_page_cache(path: Path) -> None:
    """Makes the next read of `path` a cold one; what was written to it must have been flushed."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _key(record: int) -> bytes:
    return record.to_bytes(8, "big")
