"""Packs the counts of a store's policies into the bytes of one small file; `docs/format.md` draws it.

It is the prefix of every structure, then msgpack: [uuid of the store, [namespace, ...]]. Counts are hints: whoever cannot read them
goes on without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from paramstore.core.counts import PartCounts
from paramstore.core.key import KeySpace
from paramstore.errors import CapacityError, CorruptRecord
from paramstore.storage.format.sealing import PREFIX_BYTES, seal, unseal

COUNTS_MAGIC = b"PSCOUNTS"
COUNTS_BYTES_MAX = 64 << 20
"""Length of a file: 9 bytes for each key and arena as a rule, so 27 namespaces of the most keys."""
NUMBER_MAX = 1e100
"""Larger than any count that a policy may reach."""


@dataclass(frozen=True, slots=True)
class NamespaceCounts:
    """Counts of one namespace at `epoch`. keys: in their order the counts of each part stand."""

    name: str
    epoch: int
    keys: KeySpace
    parts: PartCounts


_decoder = msgspec.msgpack.Decoder(tuple[bytes, tuple[NamespaceCounts, ...]])


def pack_counts(store_uuid: bytes, namespaces: Sequence[NamespaceCounts]) -> bytes:
    """Packs the counts of a store, of which `unpack_counts` makes equal ones. Raises CapacityError if they are too many."""
    packed = bytearray(PREFIX_BYTES) + msgspec.msgpack.encode((store_uuid, namespaces))
    if len(packed) > COUNTS_BYTES_MAX:
        raise CapacityError(f"the counts take {len(packed)} bytes, a file has at most {COUNTS_BYTES_MAX}")
    seal(packed, COUNTS_MAGIC, len(packed))
    return bytes(packed)


def unpack_counts(data: bytes, store_uuid: bytes) -> Sequence[NamespaceCounts]:
    """Unpacks what `pack_counts` packed for this store. Raises CorruptRecord if `data` is anything else."""
    if unseal(data, COUNTS_MAGIC, "file of counts") != len(data):
        raise CorruptRecord(f"file of counts: more follows it, to {len(data)} bytes")
    try:
        found_uuid, namespaces = _decoder.decode(data[PREFIX_BYTES:])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptRecord(f"file of counts: {error}") from error
    if found_uuid != store_uuid:
        raise CorruptRecord(f"file of counts: it is of store {found_uuid.hex()}, not {store_uuid.hex()}")
    runs = [one for namespace in namespaces for part in namespace.parts.values() for one in part]
    if not all(0 <= number <= NUMBER_MAX for one in runs for number in (*one.hits, *one.routed, one.accesses, one.visits)):
        raise CorruptRecord("file of counts: a number in it is no count")
    return namespaces
