"""Packs the device sums of a store's records into the bytes of one small file; `docs/format.md` draws it.

It is the prefix of every structure, then msgpack: [uuid of the store, [run, ...]], each run the msgpack of a list of at most
RUN_RECORDS records: one call of C holds up whatever else the process does for no longer than a run takes. Whoever cannot read
them makes them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from paramstore.core.checksums import SUM_BYTES
from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.errors import CapacityError, CorruptRecord
from paramstore.storage.format.sealing import PREFIX_BYTES, seal, unseal

SUMS_MAGIC = b"PSDEVSUM"
SUMS_BYTES_MAX = 256 << 20
"""Length of a file: 8 bytes a MiB of records and about 60 a record, so 16 TiB of records of 4 MiB."""

RUN_RECORDS = 100
"""The most records that are packed or unpacked in one call: under a millisecond."""


@dataclass(frozen=True, slots=True)
class RecordSums:
    """The device sums of the record of `key` that has this identity and root, as `core.checksums.pack_sums` packs them."""

    namespace: str
    key: ExpertKey
    identity: Identity
    root: int
    sums: bytes


_decoder = msgspec.msgpack.Decoder(tuple[bytes, tuple[bytes, ...]])
_run_decoder = msgspec.msgpack.Decoder(Annotated[list[RecordSums], msgspec.Meta(max_length=RUN_RECORDS)])


def pack_device_sums(store_uuid: bytes, records: Sequence[RecordSums]) -> bytes:
    """Packs the sums of a store, of which `unpack_device_sums` makes equal ones. Raises CapacityError if they are too many."""
    runs = [
        msgspec.msgpack.encode(records[start : start + RUN_RECORDS]) for start in range(0, len(records), RUN_RECORDS)
    ]
    packed = bytearray(PREFIX_BYTES) + msgspec.msgpack.encode((store_uuid, runs))
    if len(packed) > SUMS_BYTES_MAX:
        raise CapacityError(f"the device sums take {len(packed)} bytes, a file has at most {SUMS_BYTES_MAX}")
    seal(packed, SUMS_MAGIC, len(packed))
    return bytes(packed)


def unpack_device_sums(data: bytes, store_uuid: bytes) -> Sequence[RecordSums]:
    """Unpacks what `pack_device_sums` packed for this store. Raises CorruptRecord if `data` is anything else."""
    if unseal(data, SUMS_MAGIC, "file of device sums") != len(data):
        raise CorruptRecord(f"file of device sums: more follows it, to {len(data)} bytes")
    try:
        found_uuid, runs = _decoder.decode(memoryview(data)[PREFIX_BYTES:])
        records = [record for run in runs for record in _run_decoder.decode(run)]
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptRecord(f"file of device sums: {error}") from error
    if found_uuid != store_uuid:
        raise CorruptRecord(f"file of device sums: it is of store {found_uuid.hex()}, not {store_uuid.hex()}")
    if not all(record.sums and len(record.sums) % SUM_BYTES == 0 for record in records):
        raise CorruptRecord("file of device sums: a record has no whole sums")
    return records
