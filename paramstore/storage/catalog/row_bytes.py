"""Keys and values of the catalog's rows as bytes: the only place that builds or reads either.

A key is a tag and big-endian numbers, so that a cursor meets format, namespaces, volumes, steps and rows in
this order, and the rows of one key by first step. A value is the xxh3 of key and body, then the body, a
msgpack array: so bytes that rotted, or that stand under a wrong key, are found out.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec
from xxhash import xxh3_64_digest

from paramstore.core.key import ExpertKey
from paramstore.core.location import Located
from paramstore.errors import CatalogError, CorruptCatalog
from paramstore.storage.catalog.base import NamespaceRow, StepRow, VolumeRow

FORMAT_NAME = "paramstore catalog"
FORMAT_VERSION = 1

FORMAT_TAG, NAMESPACE_TAG, VOLUME_TAG, STEP_TAG, ROW_TAG = range(1, 6)
FORMAT_KEY = bytes([FORMAT_TAG])
CHECKSUM_BYTES = 8
ROW_BYTES_BOUND = 256
"""Bytes that one row can take of a half-full page: key, value and LMDB's own bookkeeping."""

_NUMBERED = struct.Struct(">BI")  # tag, namespace id or volume index
_STEP = struct.Struct(">BIQ")  # tag, namespace id, step
_ROW = struct.Struct(">BIIIQ")  # tag, namespace id, layer, expert, first step
_STEP_BIAS = 1 << 63
"""Added to a step, so that negative ones sort first."""

_Namespace = tuple[str, dict[str, object], tuple[int, ...], int, int, int, tuple[tuple[int, int], ...], int]
_Format = tuple[str, int, bytes]


class _Step(msgspec.Struct, array_like=True, frozen=True):
    """Body of a step's row. Where its records miss nothing the last value is left out, on writing too."""

    sequence: int
    note_slot: int
    record_count: int
    extra: bytes
    applies: int
    is_snapshot: bool
    is_prepared: bool
    log: bytes = b""


class _Volume(msgspec.Struct, array_like=True, frozen=True):
    """Body of a volume's row. Rows from before the last values were recorded lack them."""

    uuid: bytes
    size_bytes: int
    written_bytes: int
    bytes_written: int = 0
    place: str = ""


_encode = msgspec.msgpack.Encoder().encode
_located_decoder = msgspec.msgpack.Decoder(Located)
_namespace_decoder = msgspec.msgpack.Decoder(_Namespace)
_step_decoder = msgspec.msgpack.Decoder(_Step)
_volume_decoder = msgspec.msgpack.Decoder(_Volume)
_format_decoder = msgspec.msgpack.Decoder(_Format)
_Body = TypeVar("_Body")


# --- keys ---


def namespace_key(namespace_id: int) -> bytes:
    return _NUMBERED.pack(NAMESPACE_TAG, namespace_id)


def volume_key(index: int) -> bytes:
    return _NUMBERED.pack(VOLUME_TAG, index)


def step_key(namespace_id: int, step: int) -> bytes:
    return _STEP.pack(STEP_TAG, namespace_id, step + _STEP_BIAS)


def row_key(namespace_id: int, key: ExpertKey, first_step: int) -> bytes:
    return _ROW.pack(ROW_TAG, namespace_id, key[0], key[1], first_step + _STEP_BIAS)


def prefixes_of(namespace_id: int) -> tuple[bytes, bytes]:
    """The prefixes of all keys of a namespace's steps, and of its rows."""
    return _NUMBERED.pack(STEP_TAG, namespace_id), _NUMBERED.pack(ROW_TAG, namespace_id)


def read_number(key: bytes) -> int:
    """Namespace id or volume index in the key of a namespace's or volume's row."""
    _, number = _NUMBERED.unpack(key)
    return int(number)


def read_step_key(key: bytes) -> tuple[int, int]:
    """(namespace id, step) in the key of a step's row."""
    _, namespace_id, biased = _STEP.unpack(key)
    return namespace_id, biased - _STEP_BIAS


def read_row_key(key: bytes) -> tuple[int, ExpertKey, int]:
    """(namespace id, key, first step) in the key of a record's row."""
    _, namespace_id, layer, expert, biased = _ROW.unpack(key)
    return namespace_id, (layer, expert), biased - _STEP_BIAS


def describe_key(key: bytes) -> str:
    """Names the row in an error message, as far as the key tells."""
    try:
        match key[:1]:
            case b"\x01":
                return "format row"
            case b"\x02":
                return f"row of namespace number {read_number(key)}"
            case b"\x03":
                return f"row of volume {read_number(key)}"
            case b"\x04":
                return "row of step {1} of namespace number {0}".format(*read_step_key(key))
            case b"\x05":
                return "row of key {1} from step {2} on, namespace number {0}".format(*read_row_key(key))
    except struct.error:
        pass  # a key of a wrong length is shown as bytes, below
    return f"row under the unknown key {key.hex()}"


# --- values ---


def pack_format(store_uuid: bytes) -> bytes:
    return _seal(FORMAT_KEY, (FORMAT_NAME, FORMAT_VERSION, store_uuid))


def unpack_format(value: bytes) -> bytes:
    """Returns the store's uuid. Raises CatalogError if the catalog is of another format or version."""
    store_uuid: bytes
    name, version, store_uuid = _unseal(FORMAT_KEY, value, _format_decoder)
    if name != FORMAT_NAME or version != FORMAT_VERSION:
        raise CatalogError(
            f"format {name!r} of version {version}; this program reads {FORMAT_NAME!r} of version "
            f"{FORMAT_VERSION}"
        )
    return store_uuid


def pack_namespace(key: bytes, row: NamespaceRow) -> bytes:
    body = (row.name, row.schema, row.layers, row.experts, row.epoch, row.sequence, row.epoch_bounds, row.applies)
    return _seal(key, body)


def unpack_namespace(key: bytes, value: bytes) -> NamespaceRow:
    return NamespaceRow(*_unseal(key, value, _namespace_decoder))


def pack_volume(key: bytes, row: VolumeRow) -> bytes:
    return _seal(key, (row.uuid, row.size_bytes, row.written_bytes, row.bytes_written, row.place))


def unpack_volume(key: bytes, value: bytes) -> VolumeRow:
    return VolumeRow(read_number(key), *msgspec.structs.astuple(_unseal(key, value, _volume_decoder)))


def pack_step(key: bytes, row: StepRow) -> bytes:
    body = (row.sequence, row.note_slot, row.record_count, row.extra, row.applies, row.is_snapshot, row.is_prepared)
    return _seal(key, (*body, row.log) if row.log else body)


def unpack_step(key: bytes, value: bytes) -> StepRow:
    return StepRow(read_step_key(key)[1], *msgspec.structs.astuple(_unseal(key, value, _step_decoder)))


def pack_located(key: bytes, located: Located) -> bytes:
    return _seal(key, located)


def unpack_located(key: bytes, value: bytes) -> Located:
    return _unseal(key, value, _located_decoder)


def _seal(key: bytes, body: tuple[object, ...]) -> bytes:
    encoded = _encode(body)
    return xxh3_64_digest(key + encoded) + encoded


def _unseal(key: bytes, value: bytes, decoder: msgspec.msgpack.Decoder[_Body]) -> _Body:
    """Returns the body of `value`. Raises CorruptCatalog naming the row if checksum or shape are wrong."""
    encoded = value[CHECKSUM_BYTES:]
    if xxh3_64_digest(key + encoded) != value[:CHECKSUM_BYTES]:
        raise CorruptCatalog(f"{describe_key(key)} does not match its checksum")
    try:
        return decoder.decode(encoded)
    except msgspec.DecodeError as error:
        raise CorruptCatalog(f"{describe_key(key)} is not of the shape we write: {error}") from error
