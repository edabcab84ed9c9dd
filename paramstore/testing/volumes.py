"""Volumes without a disk, and volumes that fail.

MemoryVolume is the disk model of the crash tests: what was written since the last flush may be lost, torn at
sectors or survive in any combination (`crash`). FaultyVolume makes the N-th call of any volume fail, as
harshly as the contract allows. Both pass `volume_contract.VolumeContract`.
"""

from __future__ import annotations

import logging
import mmap
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

from paramstore.core.location import Tier
from paramstore.core.schema import round_up
from paramstore.errors import VolumeError
from paramstore.storage.volume.base import ALIGNMENT_BYTES, Volume, check_range

logger = logging.getLogger(__name__)

SECTOR_BYTES = 512
"""Size of what a simulated power cut writes whole or not at all."""


class Unflushed(NamedTuple):
    """One write since the last flush: its offset, the bytes it replaced and the bytes it brought."""

    offset_bytes: int
    before: bytes
    after: bytes

    @property
    def sectors(self) -> int:
        return len(self.after) // SECTOR_BYTES


Keep = Callable[[int, int], Collection[int]]
"""Function from (number of a write since the last flush, its count of sectors) to the sectors that survive."""


def keep_none(write: int, sectors: int) -> Collection[int]:
    """Loses everything since the last flush."""
    return ()


def keep_all(write: int, sectors: int) -> Collection[int]:
    """Keeps everything, flushed or not."""
    return range(sectors)


def drop_write(number: int) -> Keep:
    """Loses only write `number`: those after it got to the disk first."""
    return lambda write, sectors: () if write == number else range(sectors)


def tear_write(number: int, kept_sectors: int) -> Keep:
    """Stops write `number` after `kept_sectors`; later ones are lost."""
    return lambda write, sectors: range(sectors) if write < number else range(kept_sectors if write == number else 0)


def keep_random(seed: int) -> Keep:
    """Keeps any subset of sectors of any subset of writes; logs its seed, so that a failure can be repeated."""
    logger.warning("crash with seed %d", seed)
    source = random.Random(seed)

    def keep(write: int, sectors: int) -> Collection[int]:
        share = source.choice((0.0, 0.5, 1.0))
        return [sector for sector in range(sectors) if source.random() < share]

    return keep


class MemoryVolume:
    """Owner of its bytes and of the writes that are not flushed yet. `capacity_bytes` bounds `grow`."""

    def __init__(self, size_bytes: int, *, index: int = 0, tier: Tier = Tier.NVME, capacity_bytes: int | None = None) -> None:
        self.index = index
        self.tier = tier
        self._capacity_bytes = capacity_bytes
        self._bytes = bytearray(size_bytes)
        self._unflushed: list[Unflushed] = []
        self._lock = threading.Lock()

    @classmethod
    def of(cls, image: bytearray, *, index: int) -> MemoryVolume:
        """Makes a disk that holds `image`, durably; the image belongs to the disk from here on."""
        volume = cls(0, index=index)
        volume._bytes = image
        return volume

    @property
    def size_bytes(self) -> int:
        return len(self._bytes)

    @property
    def unflushed(self) -> tuple[Unflushed, ...]:
        """The writes that a crash now could undo, oldest first."""
        return tuple(self._unflushed)

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        with self._lock:
            check_range(offset_bytes, into, size_bytes=self.size_bytes, place=self._place)
            with memoryview(self._bytes) as image:
                for buffer in into:
                    buffer.cast("B")[:] = image[offset_bytes : offset_bytes + buffer.nbytes]
                    offset_bytes += buffer.nbytes

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        with self._lock:
            length_bytes = check_range(offset_bytes, data, size_bytes=self.size_bytes, place=self._place)
            if not length_bytes:
                return  # nothing to remember
            span = slice(offset_bytes, offset_bytes + length_bytes)
            after = b"".join(data)
            self._unflushed.append(Unflushed(offset_bytes, bytes(self._bytes[span]), after))
            self._bytes[span] = after

    def flush(self) -> None:
        with self._lock:
            self._unflushed.clear()

    def grow(self, size_bytes: int) -> None:
        with self._lock:
            if self._capacity_bytes is not None and size_bytes > self._capacity_bytes:
                missing_bytes = size_bytes - self._capacity_bytes
                raise VolumeError(f"{self._place}: cannot grow to {size_bytes} bytes: {missing_bytes} bytes are missing")
            self._bytes.extend(bytes(max(0, size_bytes - len(self._bytes))))

    def open_to_read(self) -> int:
        """Opens a file of the bytes as they are now: see `storage.volume.base.HasFile`."""
        descriptor = os.memfd_create(f"volume-{self.index}", os.MFD_CLOEXEC)
        os.pwrite(descriptor, self._bytes, 0)
        return descriptor

    def describe(self) -> dict[str, object]:
        return {
            "index": self.index, "tier": self.tier.value, "path": "", "mode": "memory", "reason": "", "size_bytes": self.size_bytes,
        }  # fmt: skip

    def close(self) -> None:
        """Does nothing: the bytes stay, so that a test can open the store again."""

    def crash(self, keep: Keep = keep_none) -> None:
        """Cuts the power: of the writes since the last flush, only what `keep` names has reached the disk."""
        with self._lock:
            for write in reversed(self._unflushed):
                self._bytes[write.offset_bytes : write.offset_bytes + len(write.before)] = write.before
            for number, write in enumerate(self._unflushed):
                for sector in keep(number, write.sectors):
                    start = sector * SECTOR_BYTES
                    piece = write.after[start : start + SECTOR_BYTES]
                    self._bytes[write.offset_bytes + start : write.offset_bytes + start + len(piece)] = piece
            self._unflushed.clear()

    def after_crash(self, keep: Keep) -> MemoryVolume:
        """Makes the disk that a crash now would leave; this one goes on as it is."""
        successor = MemoryVolume(0, index=self.index, tier=self.tier, capacity_bytes=self._capacity_bytes)
        with self._lock:
            successor._bytes = bytearray(self._bytes)
            successor._unflushed = list(self._unflushed)
        successor.crash(keep)
        return successor

    def corrupt(self, offset_bytes: int, mask: int = 0x01) -> None:
        """Flips the bits of `mask` in one byte, behind everybody's back."""
        self._bytes[offset_bytes] ^= mask

    @property
    def _place(self) -> str:
        return f"volume {self.index} (memory)"


Operation = Literal["read", "write", "flush", "grow"]


class Fault(NamedTuple):
    """Order that the `nth` call of `operation` (1 is the first) fails, and with `forever` every later one as well."""

    operation: Operation
    nth: int
    forever: bool = False

    def strikes(self, operation: str, number: int) -> bool:
        return operation == self.operation and (number == self.nth or (self.forever and number > self.nth))


class WrappedVolume:
    """`inner` as it is: a base for volumes that do one thing differently."""

    def __init__(self, inner: Volume) -> None:
        self.inner = inner
        self.index = inner.index
        self.tier = inner.tier

    @property
    def size_bytes(self) -> int:
        return self.inner.size_bytes

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        self.inner.read(offset_bytes, into)

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        self.inner.write(offset_bytes, data)

    def flush(self) -> None:
        self.inner.flush()

    def grow(self, size_bytes: int) -> None:
        self.inner.grow(size_bytes)

    def describe(self) -> dict[str, object]:
        return self.inner.describe()

    def close(self) -> None:
        self.inner.close()


class ReadOnly:
    """Forbids what the opening of a store must not do to its volumes."""

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        raise AssertionError("opening a store writes nothing")

    def flush(self) -> None:
        raise AssertionError("opening a store flushes nothing")

    def grow(self, size_bytes: int) -> None:
        raise AssertionError("opening a store grows nothing")


class FaultyVolume(WrappedVolume):
    """`inner`, with calls that fail and leave garbage in a read's buffers and in the first half of a write's range.

    calls: how often each operation was called, so that a test can sweep over every site; fired: how many
    failed.
    """

    def __init__(self, inner: Volume, plan: Sequence[Fault]) -> None:
        super().__init__(inner)
        self.plan = tuple(plan)
        self.calls: Counter[str] = Counter()
        self.fired = 0
        self._lock = threading.Lock()

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        failure = self._count("read")
        if failure is not None:
            for buffer in into:
                buffer.cast("B")[:] = b"\xde" * buffer.nbytes
            raise failure
        self.inner.read(offset_bytes, into)

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        failure = self._count("write")
        if failure is None:
            self.inner.write(offset_bytes, data)
            return
        whole = b"".join(data)
        torn = page_aligned(round_up(len(whole) // 2, ALIGNMENT_BYTES))
        torn[:] = whole[: len(torn)]
        self.inner.write(offset_bytes, [torn])
        raise failure

    def flush(self) -> None:
        failure = self._count("flush")
        if failure is not None:
            raise failure
        super().flush()

    def grow(self, size_bytes: int) -> None:
        failure = self._count("grow")
        if failure is not None:
            raise failure
        super().grow(size_bytes)

    def _count(self, operation: Operation) -> VolumeError | None:
        with self._lock:
            self.calls[operation] += 1
            number = self.calls[operation]
            if not any(fault.strikes(operation, number) for fault in self.plan):
                return None
            self.fired += 1
            return VolumeError(f"volume {self.index}: {operation} number {number} fails as planned")


def page_aligned(length_bytes: int, seed: int | None = None) -> memoryview:
    """Makes a writable buffer that any volume takes: zeros, or the random bytes of `seed`."""
    buffer = memoryview(mmap.mmap(-1, length_bytes))
    if seed is not None:
        buffer[:] = random.Random(seed).randbytes(length_bytes)
    return buffer
