"""Device sums: what plain integers give, in any split, with every change of one word seen."""

from __future__ import annotations

import random
import struct

import numpy
import pytest
from xxhash import xxh3_64_intdigest

from paramstore.core.checksums import MASK, WORD_BYTES, WORDS, device_sums, header_root, multipliers, pack_sums
from paramstore.core.schema import CHUNK_BYTES, Chunk

SEED = 50


def by_integers(data: bytes) -> int:
    """The sum as the module's docstring says it, in Python's integers."""
    padded = data + bytes(-len(data) % WORD_BYTES)
    words = struct.unpack(f"<{len(padded) // WORD_BYTES}i", padded)
    return sum(word * int(odd) for word, odd in zip(words, multipliers(), strict=False)) & MASK


@pytest.mark.parametrize("length_bytes", [1, 2, 3, 4, 5, 4096, 10_001])
def test_sums_are_those_of_plain_integers(length_bytes: int) -> None:
    data = random.Random(SEED).randbytes(length_bytes)
    assert device_sums(memoryview(data), [Chunk(0, length_bytes)]) == [by_integers(data)]


def test_each_chunk_is_summed_where_it_lies_and_counts_from_its_own_beginning() -> None:
    data = random.Random(SEED).randbytes(3 * 4096)
    chunks = [Chunk(8192 + start, 4096) for start in (0, 4096, 8192)]
    found = device_sums(memoryview(data), chunks, 8192)
    assert found == [by_integers(data[start : start + 4096]) for start in (0, 4096, 8192)]


def test_a_whole_chunk_has_a_multiplier_for_every_word() -> None:
    words = numpy.full(WORDS, -1, dtype="<i4")
    total = sum(int(odd) for odd in multipliers())
    assert device_sums(memoryview(words).cast("B"), [Chunk(0, CHUNK_BYTES)]) == [-total & MASK]


def test_multipliers_are_odd_distinct_and_those_of_splitmix64() -> None:
    assert len(set(multipliers().tolist())) == WORDS
    assert all(odd & 1 for odd in multipliers().tolist())
    first, second = (int(odd) & MASK for odd in multipliers()[:2])
    assert (first, second) == (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 | 1)  # the published outputs for seed 0


def test_two_flipped_top_bits_of_words_are_seen() -> None:
    data = bytearray(random.Random(SEED).randbytes(4096))
    before = device_sums(memoryview(bytes(data)), [Chunk(0, 4096)])
    for word in (5, 900):
        data[word * WORD_BYTES + 3] ^= 0x80
    assert device_sums(memoryview(data), [Chunk(0, 4096)]) != before


def test_sums_are_packed_in_eight_bytes_each_in_order() -> None:
    assert pack_sums([1, MASK]) == bytes([1, *[0] * 7, *[255] * 8])


def test_a_root_is_the_xxh3_of_the_header() -> None:
    assert header_root(b"header") == xxh3_64_intdigest(b"header")
