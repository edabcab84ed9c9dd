"""Traces come back from their bytes as they were; anything else is refused."""

from __future__ import annotations

import json
import random
import zlib

import pytest

from paramstore.core.schema import Schema
from paramstore.core.trace import (
    MAGIC,
    MAGIC_BY_SOURCE,
    MAGIC_COUNTED,
    TOKENS_MAX,
    Trace,
    TraceEvent,
    TraceEventKind,
    TraceHeader,
    split_by_layer,
    unpack_trace,
)  # fmt: skip
from paramstore.errors import ConfigError

SCHEMA = Schema.adamw({"w": (3, 5)}, param_dtype="float32")
HEADER = TraceHeader("small", SCHEMA.describe(), [2, 5], 11, "by hand")


def some_trace(seed: int = 0) -> Trace:
    rng = random.Random(seed)
    events = [
        TraceEvent(kind, layer, tuple(sorted(rng.sample(range(11), rng.randint(0, 11)))))
        for layer in (2, 5)
        for kind in TraceEventKind
    ]
    return Trace(HEADER, tuple(events))


def test_a_trace_comes_back_as_it_was() -> None:
    trace = some_trace()
    back = unpack_trace(trace.pack())
    assert back == trace
    assert back.schema == SCHEMA
    assert (back.steps, back.has_applies) == (2, True)
    assert back.events[0].keys == [(2, expert) for expert in back.events[0].experts]


def some_counted_trace() -> Trace:
    """Every other event that names experts has tokens."""
    events = some_trace().events
    counted = [event._replace(tokens=tuple(range(TOKENS_MAX, TOKENS_MAX - len(event.experts), -1))) for event in events[::2]]
    return Trace(HEADER, (*counted, *events[1::2]))


def test_tokens_come_back_with_the_experts_they_went_to() -> None:
    trace = some_counted_trace()
    assert sum(len(event.tokens) > 0 for event in trace.events) >= 3
    assert unpack_trace(trace.pack()) == trace


def test_a_file_without_tokens_is_that_of_before() -> None:
    head = b'paramstore-trace 1\n{"experts": 11, "how": "by hand", "layers": [2, 5], "name": "small", "schema": '
    body = b"\x01\x01\x00\x05\x04" b"\x05\x00\x00\x00\x00"
    file = head + json.dumps(SCHEMA.describe(), sort_keys=True).encode() + b"}\n" + zlib.compress(body, 9)
    events = (TraceEvent(TraceEventKind.ACQUIRE, 5, (0, 2, 10)), TraceEvent(TraceEventKind.STEP, 2, ()))
    assert unpack_trace(file) == Trace(HEADER, events)
    assert Trace(HEADER, events).pack() == file
    assert some_counted_trace().pack().startswith(MAGIC_COUNTED)


def some_trace_by_source() -> Trace:
    """Of the counted events every other one has tokens of three ranks."""
    events = list(some_counted_trace().events)
    for place in range(0, len(events), 4):
        size = len(events[place].experts)
        sources = (tuple(range(size)), (TOKENS_MAX,) * size, (0,) * size) if size else ()
        events[place] = events[place]._replace(tokens=tuple(map(sum, zip(*sources, strict=True))), sources=sources)
    return Trace(HEADER, tuple(events))


def test_tokens_come_back_with_the_ranks_they_came_from() -> None:
    trace = some_trace_by_source()
    assert sum(len(event.sources) > 0 for event in trace.events) >= 2
    assert any(event.tokens and not event.sources for event in trace.events)
    packed = trace.pack()
    assert packed.startswith(MAGIC_BY_SOURCE)
    assert unpack_trace(packed) == trace


def test_a_call_on_several_layers_becomes_an_event_for_each() -> None:
    assert split_by_layer(TraceEventKind.PREFETCH, [(5, 1), (2, 0), (5, 0)]) == [
        TraceEvent(TraceEventKind.PREFETCH, 5, (0, 1)), TraceEvent(TraceEventKind.PREFETCH, 2, (0,)),
    ]  # fmt: skip


def with_body(body: bytes, magic: bytes = MAGIC) -> bytes:
    _, header, _ = some_trace().pack().split(b"\n", 2)
    return b"\n".join((magic, header, zlib.compress(body)))


def with_header(**changes: object) -> bytes:
    magic, header, body = some_trace().pack().split(b"\n", 2)
    return b"\n".join((magic, json.dumps(json.loads(header) | changes).encode(), body))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "this is no trace"),
        (some_trace().pack().replace(MAGIC, b"paramstore-trace 9"), "begins with b'paramstore-trace 9'"),
        (some_trace().pack().replace(MAGIC, b"paramstore-trace 9"), "a newer paramstore has written it"),
        (b"a model\n{}\n", r"b'a model', not with .*3'$"),
        (MAGIC, "this is no trace"),
        (some_trace().pack()[:-3], "cut off"),
        (with_body(b"\x01\x00\x00\x00"), "end within an event"),
        (with_body(b"\x01\x00\x00\x00\x08"), "above 10"),
        (with_body(b"\x09\x00\x00\x00\x00"), "9 is not a valid"),
        (with_body(b"\x01\x02\x00\x00\x00"), "index out of range"),
        (with_body(b"\x81\x00\x00\x01\x00\x07\x00\x00\x00"), "129 is not a valid"),
        (with_body(b"\x81\x00\x00\x01\x00\x07\x00\x00", magic=MAGIC_COUNTED), "end within an event"),
        (with_body(b"\x09\x00\x00\x00\x00", magic=MAGIC_COUNTED), "9 is not a valid"),
        (with_body(b"\x41\x00\x00\x01\x00\x01\x00\x07\x00\x00\x00", magic=MAGIC_COUNTED), "65 is not a valid"),
        (with_body(b"\xc1\x00\x00\x01\x00\x01\x00\x07\x00\x00\x00", magic=MAGIC_BY_SOURCE), "193 is not a valid"),
        (with_body(b"\x41\x00\x00\x01\x00\x02\x00\x07\x00\x00\x00", magic=MAGIC_BY_SOURCE), "end within an event"),
        (with_body(b"\x41\x00\x00\x01\x00\x02", magic=MAGIC_BY_SOURCE), "end within an event"),
        (with_header(experts=0), "experts=0"),
        (with_header(colour="red"), "colour"),
    ],
)
def test_what_is_no_trace_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        unpack_trace(content)
