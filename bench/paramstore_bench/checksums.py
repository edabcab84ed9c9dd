"""Measures how fast one core makes the checksums of records, of 1 MiB chunks, through the code that the workers use: xxh3, and the
device sums by which a reader of extents proves them.

The memory was just touched and is larger than the caches, as after a read. A figure stands beside the disk's rate: a core must sum
faster than a volume moves bytes, or verifying costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from paramstore.bench.context import GIGA, Bench
from paramstore.bench.plan import MIB
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.core.checksums import device_sums
from paramstore.core.schema import CHUNK_BYTES, Chunk
from paramstore.engine.transfers.hashing import Hashing

IMAGE_BYTES = 256 * MIB
DEVICE_SUMS_TARGET = 2.0
Summing = Callable[[memoryview, Sequence[Chunk]], Sequence[int]]


def measure_checksums(bench: Bench, *, image_bytes: int = IMAGE_BYTES) -> Iterator[Row]:
    """Measures GB/s of one thread, the median of the plan's rounds."""
    image = memoryview(bytearray(b"\x5a") * image_bytes)
    yield _measure(bench, "checksums", "one core, xxh3 of 1 MiB chunks", image, Hashing(at_once=1).checksums, None)
    target = Target("value", ">=", DEVICE_SUMS_TARGET)
    yield _measure(bench, "device sums", "one core, 1 MiB chunks", image, device_sums, target)


def _measure(bench: Bench, name: str, case: str, image: memoryview, summing: Summing, target: Target | None) -> Row:
    chunks = [Chunk(at, CHUNK_BYTES) for at in range(0, len(image), CHUNK_BYTES)]
    rates = []
    for _ in range(bench.plan.rounds):
        started_s = bench.clock.now_s()
        sums = summing(image, chunks)
        rates.append(len(image) / (bench.clock.now_s() - started_s))
        assert len(sums) == len(chunks)
    return judged(Row(
        name=name, case=case, subject=SUBJECT, unit="GB/s", value=median(rates) / GIGA, target=target,
        parts={"min_gb_s": min(rates) / GIGA, "max_gb_s": max(rates) / GIGA, "image_bytes": len(image)},
    ))  # fmt: skip
