"""The two proofs of a record that did not come through the daemon's memory: the root of its header, and a device sum of each chunk.

A device sum is what any processor computes with plain integers, in whatever order: the sum of w_i * r_i modulo 2^64 over the
little-endian int32 words w_i of a chunk, zeros after its end, with r_i a fixed odd number of 64 bits. That is multilinear hashing
(Carter and Wegman, "Universal classes of hash functions", JCSS 18, 1979) whose keys are known: it guards against faults, not
against an enemy, as xxh3 does.

- One changed word changes the sum for certain: it differs by less than 2^32, and r_i is odd.
- Words of 64 bits would not do: two flipped top bits would cancel, 2^63 * (r_i + r_j) being 0 modulo 2^64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from xxhash import xxh3_64_intdigest

from paramstore.core.schema import CHUNK_BYTES, Chunk

WORD_BYTES = 4
SUM_BYTES = 8
WORDS = CHUNK_BYTES // WORD_BYTES
"""Words of a whole chunk, and so the count of multipliers."""
MASK = (1 << 64) - 1


def header_root(data: bytes | bytearray | memoryview) -> int:
    """The root, by which the catalog proves a record: the xxh3 of its whole header. data: exactly the header."""
    return int(xxh3_64_intdigest(data))


@lru_cache(maxsize=1)
def multipliers() -> Any:
    """Makes r_1 to r_WORDS, an int64 array of numpy that nobody may write: the outputs of SplitMix64 from state 0 on (Steele, Lea
    and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17), made odd."""
    import numpy  # where it computes: importing the client takes no numpy

    states = numpy.arange(1, WORDS + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    states = (states ^ (states >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ (states >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    odd = ((states ^ (states >> numpy.uint64(31))) | numpy.uint64(1)).view(numpy.int64)
    odd.flags.writeable = False
    return odd


def device_sums(image: memoryview, chunks: Sequence[Chunk], base_bytes: int = 0) -> list[int]:
    """Computes the device sum of each chunk, in order, each from 0 to 2^64 - 1.

    image: bytes of the part from offset `base_bytes` on, at least to the chunks' end. Other threads run meanwhile.
    """
    import numpy

    sums = []
    for chunk in chunks:
        start = chunk.offset_bytes - base_bytes
        data: bytes | memoryview = image[start : start + chunk.length_bytes]
        if left := chunk.length_bytes % WORD_BYTES:
            data = bytes(data) + bytes(WORD_BYTES - left)
        words = numpy.frombuffer(data, dtype="<i4")
        sums.append(int(numpy.einsum("i,i->", words, multipliers()[: len(words)])) & MASK)  # faster than a product and its sum
    return sums


def pack_sums(sums: Sequence[int]) -> bytes:
    """Device sums as they are sent and kept: SUM_BYTES each, little-endian."""
    import numpy

    return numpy.array(sums, dtype="<u8").tobytes()
