"""Routing traces: what a program asked of its experts, packed, to be replayed against policies and arena sizes.

A file is one line `paramstore-trace 1`, one line of JSON (`TraceHeader`), and a zlib stream of events: a kind (one byte), the
position of a layer in the header's `layers` (two bytes, little-endian), and a bitmap of the layer's experts, lowest first.
A call that names several layers becomes several events of one kind. `APPLY` and `STEP` name no experts.

A file in which tokens were counted says `paramstore-trace 2`: where `COUNTED` is added to the kind, the bitmap is followed by the
tokens that went to each of the experts that it names (four bytes each, little-endian).

A file in which they were counted by the rank that they came from says `paramstore-trace 3`: where `BY_SOURCE` is added to the kind,
the bitmap is followed by the number of ranks (two bytes), and by such tokens for each rank.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import NamedTuple

from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.schema import Schema
from paramstore.errors import ConfigError, ParamStoreError

MAGIC = b"paramstore-trace 1"
MAGIC_COUNTED = b"paramstore-trace 2"
MAGIC_BY_SOURCE = b"paramstore-trace 3"
FLAGS = {MAGIC: 0, MAGIC_COUNTED: 0x80, MAGIC_BY_SOURCE: 0xC0}
"""The bits that a file of each version may add to a kind."""
COUNTED, BY_SOURCE = 0x80, 0x40
TOKENS_BYTES, SOURCES_BYTES = 4, 2
TOKENS_MAX = (1 << 8 * TOKENS_BYTES) - 1
"""The most tokens that an event may count for one expert."""
EVENTS_BYTES_MAX = 1 << 30
"""The most bytes of unpacked events: a file with more is no trace that anybody recorded."""


class TraceEventKind(IntEnum):
    """The calls that a trace records."""

    ACQUIRE = 1
    PREFETCH = 2
    PUSH = 3
    APPLY = 4
    """Consumes everything pushed since the last one."""
    STEP = 5
    """A step, or a token, is over."""


class TraceEvent(NamedTuple):
    """The part of one call that concerns one layer. experts: ascending. tokens: how many went to each of them; empty if nobody
    counted. sources: of each rank of a job, how many of them were its own; empty if nobody counted that."""

    kind: TraceEventKind
    layer: int
    experts: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    sources: tuple[tuple[int, ...], ...] = ()

    @property
    def keys(self) -> list[ExpertKey]:
        return [(self.layer, expert) for expert in self.experts]


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Says which experts a trace is of, and how it was made. schema: as `Schema.describe` returns it; how: for people."""

    name: str
    schema: dict[str, object]
    layers: list[int]
    experts: int
    how: str

    @property
    def space(self) -> KeySpace:
        return KeySpace.of(self.layers, self.experts)


@dataclass(frozen=True, slots=True)
class Trace:
    """A header, and the events in order."""

    header: TraceHeader
    events: tuple[TraceEvent, ...]

    @property
    def schema(self) -> Schema:
        return Schema.from_description(self.header.schema)

    @property
    def has_applies(self) -> bool:
        """Whether the traced program trains."""
        return any(event.kind is TraceEventKind.APPLY for event in self.events)

    @property
    def steps(self) -> int:
        return sum(event.kind is TraceEventKind.STEP for event in self.events)

    def pack(self) -> bytes:
        """Returns the bytes of a trace file."""
        header = json.dumps(asdict(self.header), sort_keys=True).encode()
        width = _bitmap_bytes(self.header.experts)
        places = {layer: place for place, layer in enumerate(self.header.layers)}
        body = bytearray()
        for kind, layer, experts, tokens, sources in self.events:
            flag = BY_SOURCE if sources else COUNTED if tokens else 0
            body += bytes([kind | flag]) + places[layer].to_bytes(2, "little")
            body += sum(1 << expert for expert in experts).to_bytes(width, "little")
            body += len(sources).to_bytes(SOURCES_BYTES, "little") if sources else b""
            for counts in sources or (tokens,):
                body += b"".join(count.to_bytes(TOKENS_BYTES, "little") for count in counts)
        is_counted, is_by_source = (any(getattr(event, name) for event in self.events) for name in ("tokens", "sources"))
        magic = MAGIC_BY_SOURCE if is_by_source else MAGIC_COUNTED if is_counted else MAGIC
        return b"\n".join((magic, header, zlib.compress(body, 9)))


def unpack_trace(content: bytes) -> Trace:
    """Unpacks the bytes of a trace file. Raises ConfigError on anything else."""
    try:
        magic, *rest = content.split(b"\n", 2)
        if magic not in FLAGS:
            advice = ", so a newer paramstore has written it: read it with that" if magic.startswith(MAGIC[:-1]) else ""
            raise ConfigError(f"it begins with {magic[:32]!r}, not with one of {', '.join(map(repr, FLAGS))}{advice}")
        described, packed = rest
        header = TraceHeader(**json.loads(described))
        _ = header.space, Schema.from_description(header.schema)
        inflate = zlib.decompressobj()
        body = inflate.decompress(packed, EVENTS_BYTES_MAX)
        if inflate.unconsumed_tail or not inflate.eof:
            raise ConfigError("its events are cut off, or more than a trace holds")
        return Trace(header, tuple(_events(header, body, flags=FLAGS[magic])))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, zlib.error, ParamStoreError) as error:
        raise ConfigError(f"this is no trace: {error}") from error


def split_by_layer(kind: TraceEventKind, keys: Iterable[ExpertKey]) -> list[TraceEvent]:
    """Splits a call on `keys` into events, one a layer, in the order in which the call names the layers."""
    experts: dict[int, set[int]] = {}
    for layer, expert in keys:
        experts.setdefault(layer, set()).add(expert)
    return [TraceEvent(kind, layer, tuple(sorted(found))) for layer, found in experts.items()]


def _events(header: TraceHeader, body: bytes, *, flags: int) -> Iterator[TraceEvent]:
    """Yields the events of `body`. flags: the bits of a kind that say that counts follow."""
    size = 3 + _bitmap_bytes(header.experts)
    start = 0
    while start < len(body):
        at = start + size
        flag = body[start] & flags
        kind = TraceEventKind(body[start] - flag if flag in (COUNTED, BY_SOURCE) else body[start])
        layer = header.layers[int.from_bytes(body[start + 1 : start + 3], "little")]
        experts = _experts(body[start + 3 : at], header.experts)
        rows, row_bytes = int(flag == COUNTED), TOKENS_BYTES * len(experts)
        if flag == BY_SOURCE:
            at += SOURCES_BYTES
            rows = int.from_bytes(body[at - SOURCES_BYTES : at], "little") if experts else 0
        start = at + rows * row_bytes
        if start > len(body):
            raise ConfigError(f"its {len(body)} bytes of events end within an event")
        counts = tuple(_counts(body[at + row * row_bytes : at + (row + 1) * row_bytes]) for row in range(rows))
        tokens = tuple(map(sum, zip(*counts, strict=True)))
        yield TraceEvent(kind, layer, experts, tokens, counts if flag == BY_SOURCE else ())


def _counts(packed: bytes) -> tuple[int, ...]:
    return tuple(int.from_bytes(packed[at : at + TOKENS_BYTES], "little") for at in range(0, len(packed), TOKENS_BYTES))


def _experts(bitmap: Sequence[int], count: int) -> tuple[int, ...]:
    number = int.from_bytes(bytes(bitmap), "little")
    if number >> count:
        raise ConfigError(f"an event names an expert above {count - 1}")
    return tuple(expert for expert in range(count) if number >> expert & 1)


def _bitmap_bytes(experts: int) -> int:
    return -(-experts // 8)
