"""The file of device sums: what was packed comes back, and nothing else is taken for it."""

from __future__ import annotations

import random

import msgspec
import pytest

from paramstore.core.location import Identity
from paramstore.errors import CapacityError, CorruptRecord
from paramstore.storage.format import device_sums
from paramstore.storage.format.device_sums import RUN_RECORDS, RecordSums, pack_device_sums, unpack_device_sums
from paramstore.storage.format.sealing import PREFIX_BYTES, seal

STORE, SEED = b"s" * 16, 50
RECORDS = [RecordSums("moe", (1, number), Identity(2, 3), (1 << 64) - 1, bytes([number]) * 16) for number in range(3)]


def test_what_was_packed_comes_back() -> None:
    assert list(unpack_device_sums(pack_device_sums(STORE, RECORDS), STORE)) == RECORDS
    assert list(unpack_device_sums(pack_device_sums(STORE, []), STORE)) == []


def test_no_call_packs_or_unpacks_more_than_a_run() -> None:
    records = [RecordSums("moe", (0, number), Identity(1, 1), 1, bytes(8)) for number in range(2 * RUN_RECORDS + 1)]
    data = pack_device_sums(STORE, records)
    assert list(unpack_device_sums(data, STORE)) == records
    _, runs = msgspec.msgpack.decode(data[PREFIX_BYTES:])
    assert [len(msgspec.msgpack.decode(run)) for run in runs] == [RUN_RECORDS, RUN_RECORDS, 1]


def test_no_damage_is_taken_for_sums() -> None:
    data, chance = pack_device_sums(STORE, RECORDS), random.Random(SEED)
    for place in [*range(len(data)), *(chance.randrange(len(data)) for _ in range(100))]:
        spoilt = bytearray(data)
        spoilt[place] ^= 1 << chance.randrange(8)
        with pytest.raises(CorruptRecord):
            unpack_device_sums(bytes(spoilt), STORE)
    for cut in (0, 5, PREFIX_BYTES, len(data) - 1):
        with pytest.raises(CorruptRecord):
            unpack_device_sums(data[:cut], STORE)
    with pytest.raises(CorruptRecord, match="more follows"):
        unpack_device_sums(data + b"x", STORE)


def test_sums_of_another_store_are_refused_by_its_name() -> None:
    with pytest.raises(CorruptRecord, match="it is of store"):
        unpack_device_sums(pack_device_sums(b"o" * 16, RECORDS), STORE)


@pytest.mark.parametrize("sums", [b"", b"seven b"])
def test_sums_that_are_no_whole_ones_are_refused(sums: bytes) -> None:
    with pytest.raises(CorruptRecord, match="no whole sums"):
        unpack_device_sums(pack_device_sums(STORE, [RecordSums("moe", (0, 0), Identity(1, 1), 1, sums)]), STORE)


def test_what_is_whole_and_says_something_else_is_refused() -> None:
    data = bytearray(PREFIX_BYTES) + b"\xc1"
    seal(data, device_sums.SUMS_MAGIC, len(data))
    with pytest.raises(CorruptRecord, match="file of device sums: "):
        unpack_device_sums(bytes(data), STORE)


def test_more_than_a_file_holds_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sums, "SUMS_BYTES_MAX", 50)
    with pytest.raises(CapacityError, match="at most 50"):
        pack_device_sums(STORE, RECORDS)
