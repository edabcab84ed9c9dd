"""The file of counts: what was packed comes back; anything else is refused, whatever it is."""

from __future__ import annotations

import random
import struct

import msgspec
import pytest

from paramstore.core.counts import Counts
from paramstore.core.key import KeySpace
from paramstore.errors import CapacityError, CorruptRecord
from paramstore.storage.format import counts as counts_module
from paramstore.storage.format.counts import COUNTS_MAGIC, NamespaceCounts, pack_counts, unpack_counts
from paramstore.storage.format.sealing import FORMAT_VERSION, PREFIX_BYTES, seal

STORE = b"s" * 16
PARTS = {"param": (Counts((0.1, 3.0), 7), Counts(routed=(0.0, 1 / 3), visits=2.5)), "optim": ()}
COUNTS = (
    NamespaceCounts("moe", 3, KeySpace((0, 2), 2), PARTS),
    NamespaceCounts("empty", 1, KeySpace((0,), 1), {}),
)


def sealed(body: object) -> bytes:
    data = bytearray(PREFIX_BYTES) + msgspec.msgpack.encode(body)
    seal(data, COUNTS_MAGIC, len(data))
    return bytes(data)


def test_what_was_packed_comes_back_bit_for_bit() -> None:
    assert unpack_counts(pack_counts(STORE, COUNTS), STORE) == COUNTS
    assert unpack_counts(pack_counts(STORE, ()), STORE) == ()


def test_every_truncation_and_every_flipped_byte_is_found() -> None:
    data = pack_counts(STORE, COUNTS)
    for length in range(len(data)):
        with pytest.raises(CorruptRecord):
            unpack_counts(data[:length], STORE)
        with pytest.raises(CorruptRecord):
            unpack_counts(data[:length] + bytes([data[length] ^ 0x20]) + data[length + 1 :], STORE)
    with pytest.raises(CorruptRecord, match="more follows"):
        unpack_counts(data + b"\0", STORE)


def test_a_newer_version_and_another_store_are_refused() -> None:
    data = bytearray(pack_counts(STORE, COUNTS))
    struct.pack_into("<I", data, 8, FORMAT_VERSION + 1)
    with pytest.raises(CorruptRecord, match=f"version {FORMAT_VERSION + 1}"):
        unpack_counts(bytes(data), STORE)
    with pytest.raises(CorruptRecord, match=f"of store {STORE.hex()}, not 0000"):
        unpack_counts(pack_counts(STORE, COUNTS), bytes(16))


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf"), 1e101])
@pytest.mark.parametrize("field", ["hits", "routed", "visits", "accesses"])
def test_what_is_no_count_is_refused(field: str, number: float) -> None:
    bad = {"hits": (1.0, number), "routed": (number,), "visits": number, "accesses": -1}[field]
    body = (STORE, [{"name": "moe", "epoch": 1, "keys": {"layers": [0], "experts": 1}, "parts": {"param": [{field: bad}]}}])
    with pytest.raises(CorruptRecord, match="is no count"):
        unpack_counts(sealed(body), STORE)


def test_a_whole_file_of_any_other_content_is_refused() -> None:
    seed = 20221037
    rng = random.Random(seed)
    bodies: list[object] = [None, [], [STORE], [STORE, 1], [STORE, [1]], ["s", []], [STORE, [{"name": "moe"}]], [[[[]]]]]
    for body in bodies + [rng.randbytes(rng.randrange(64)) for _ in range(200)]:
        with pytest.raises(CorruptRecord):
            unpack_counts(sealed(body), STORE)
    deep = bytearray(PREFIX_BYTES) + b"\x91" * 100_000
    seal(deep, COUNTS_MAGIC, len(deep))
    with pytest.raises(CorruptRecord):
        unpack_counts(bytes(deep), STORE)


def test_more_than_a_file_may_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    length = len(pack_counts(STORE, COUNTS))
    monkeypatch.setattr(counts_module, "COUNTS_BYTES_MAX", length)
    assert len(pack_counts(STORE, COUNTS)) == length
    monkeypatch.setattr(counts_module, "COUNTS_BYTES_MAX", length - 1)
    with pytest.raises(CapacityError, match=f"take {length} bytes, a file has at most {length - 1}"):
        pack_counts(STORE, COUNTS)
