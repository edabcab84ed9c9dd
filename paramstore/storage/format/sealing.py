"""The prefix that every structure on a volume starts with; its checksum shows damage to that structure alone.

magic 8 bytes | format version u32 | length u32, with this prefix | xxh3 u64 of the bytes that follow
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

from paramstore.errors import CorruptRecord

FORMAT_VERSION = 1
MAGIC_BYTES = 8

Bytes = bytes | bytearray | memoryview

_PREFIX = struct.Struct("<8sIIQ")
PREFIX_BYTES = _PREFIX.size


def seal(data: bytearray, magic: bytes, length_bytes: int) -> None:
    """Writes the prefix of the structure that takes the first `length_bytes` of `data`.

    The bytes after the prefix must be final already.
    """
    assert len(magic) == MAGIC_BYTES
    assert PREFIX_BYTES <= length_bytes <= len(data)
    _PREFIX.pack_into(data, 0, magic, FORMAT_VERSION, length_bytes, _checksum(data, length_bytes))


def unseal(data: Bytes, magic: bytes, what: str, length_bytes: int | None = None) -> int:
    """Checks the structure at the start of `data`, which may be longer, and returns the structure's length.

    length_bytes: the length it must have, if known. Raises CorruptRecord, naming `what` and the value seen, if no whole
    structure is there.
    """
    if len(data) < PREFIX_BYTES:
        raise CorruptRecord(f"no {what}: {len(data)} bytes are too few")
    found_magic, version, found_bytes, checksum = _PREFIX.unpack_from(data)
    if found_magic != magic:
        raise CorruptRecord(f"no {what}: starts with {found_magic!r}, not {magic!r}")
    if version != FORMAT_VERSION:
        raise CorruptRecord(f"{what} of format version {version}; this program reads version {FORMAT_VERSION}")
    if length_bytes is not None and found_bytes != length_bytes:
        raise CorruptRecord(f"{what} says it has {found_bytes} bytes, expected {length_bytes}")
    if not PREFIX_BYTES <= found_bytes <= len(data):
        raise CorruptRecord(f"{what} says it has {found_bytes} bytes; {len(data)} are there")
    found_checksum = _checksum(data, found_bytes)
    if found_checksum != checksum:
        raise CorruptRecord(f"{what} has checksum {found_checksum:016x}, it says {checksum:016x}")
    return int(found_bytes)


def other_version(data: Bytes, magic: bytes) -> int | None:
    """Returns the format version of the structure at the start of `data` where it is another one's and whole; else None.

    (A flipped bit of the version looks the same: only all copies together tell.)
    """
    if len(data) < PREFIX_BYTES:
        return None
    found_magic, version, found_bytes, checksum = _PREFIX.unpack_from(data)
    is_whole = PREFIX_BYTES <= found_bytes <= len(data) and _checksum(data, found_bytes) == checksum
    return int(version) if found_magic == magic and is_whole and version != FORMAT_VERSION else None


def _checksum(data: Bytes, length_bytes: int) -> int:
    return int(xxh3_64_intdigest(memoryview(data)[PREFIX_BYTES:length_bytes]))
