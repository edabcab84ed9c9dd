"""Packs the device sums of a store's records into the bytes of one small file; `docs/format.md` draws it.

It is the prefix of every structure, then msgpack: [uuid of the store, [record, ...]]. Whoever cannot read them makes them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from paramstore.core.checksums import SUM_BYTES
from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.errors import CapacityError, CorruptRecord
from paramstore.storage.format.sealing import PREFIX_BYTES, seal, unseal

SUMS_MAGIC = b"PSDEVSUM"
SUMS_BYTES_MAX = 256 << 20
"""Length of a file: 8 bytes a MiB of records and about 60 a record, so 16 TiB of records of 4 MiB."""


@dataclass(frozen=True, slots=True)
class RecordSums:
    """The device sums of the record of `key` that has this identity and root, as `core.checksums.pack_sums` packs them."""

    namespace: str
    key: ExpertKey
    identity: Identity
    root: int
    sums: bytes


_decoder = msgspec.msgpack.Decoder(tuple[bytes, tuple[RecordSums, ...]])


def pack_device_sums(store_uuid: bytes, records: Sequence[RecordSums]) -> bytes:
    """Packs the sums of a store, of which `unpack_device_sums` makes equal ones. Raises CapacityError if they are too many."""
    packed = bytearray(PREFIX_BYTES) + msgspec.msgpack.encode((store_uuid, records))
    if len(packed) > SUMS_BYTES_MAX:
        raise CapacityError(f"the device sums take {len(packed)} bytes, a file has at most {SUMS_BYTES_MAX}")
    seal(packed, SUMS_MAGIC, len(packed))
    return bytes(packed)


def unpack_device_sums(data: bytes, store_uuid: bytes) -> Sequence[RecordSums]:
    """Unpacks what `pack_device_sums` packed for this store. Raises CorruptRecord if `data` is anything else."""
    if unseal(data, SUMS_MAGIC, "file of device sums") != len(data):
        raise CorruptRecord(f"file of device sums: more follows it, to {len(data)} bytes")
    try:
        found_uuid, records = _decoder.decode(data[PREFIX_BYTES:])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptRecord(f"file of device sums: {error}") from error
    if found_uuid != store_uuid:
        raise CorruptRecord(f"file of device sums: it is of store {found_uuid.hex()}, not {store_uuid.hex()}")
    if not all(record.sums and len(record.sums) % SUM_BYTES == 0 for record in records):
        raise CorruptRecord("file of device sums: a record has no whole sums")
    return records
