"""Measures how fast one core makes the checksums of records: xxh3 of 1 MiB chunks, through the code that the workers use.

The memory was just touched and is larger than the caches, as after a read. The figure stands beside the disk's rate: a core
must hash faster than a volume moves bytes, or verifying costs time.
"""

from __future__ import annotations

from statistics import median

from paramstore.bench.context import GIGA, Bench
from paramstore.bench.plan import MIB
from paramstore.bench.report.rows import SUBJECT, Row
from paramstore.core.schema import CHUNK_BYTES, Chunk
from paramstore.engine.transfers.hashing import Hashing

IMAGE_BYTES = 256 * MIB


def measure_checksums(bench: Bench, *, image_bytes: int = IMAGE_BYTES) -> Row:
    """Measures GB/s of one thread, the median of the plan's rounds."""
    image = memoryview(bytearray(b"\x5a") * image_bytes)
    chunks = [Chunk(at, CHUNK_BYTES) for at in range(0, image_bytes, CHUNK_BYTES)]
    hashing = Hashing(at_once=1)
    rates = []
    for _ in range(bench.plan.rounds):
        started_s = bench.clock.now_s()
        checksums = hashing.checksums(image, chunks)
        rates.append(image_bytes / (bench.clock.now_s() - started_s))
        assert len(checksums) == len(chunks)
    return Row(
        name="checksums", case="one core, xxh3 of 1 MiB chunks", subject=SUBJECT, unit="GB/s", value=median(rates) / GIGA,
        parts={"min_gb_s": min(rates) / GIGA, "max_gb_s": max(rates) / GIGA, "image_bytes": image_bytes},
    )  # fmt: skip
