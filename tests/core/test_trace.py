"""Traces come back from their bytes as they were; anything else is refused."""

from __future__ import annotations

import json
import random
import zlib

import pytest

from paramstore.core.schema import Schema
from paramstore.core.trace import MAGIC, Trace, TraceEvent, TraceEventKind, TraceHeader, split_by_layer, unpack_trace
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


def test_a_call_on_several_layers_becomes_an_event_for_each() -> None:
    assert split_by_layer(TraceEventKind.PREFETCH, [(5, 1), (2, 0), (5, 0)]) == [
        TraceEvent(TraceEventKind.PREFETCH, 5, (0, 1)), TraceEvent(TraceEventKind.PREFETCH, 2, (0,)),
    ]  # fmt: skip


def with_body(body: bytes) -> bytes:
    magic, header, _ = some_trace().pack().split(b"\n", 2)
    return b"\n".join((magic, header, zlib.compress(body)))


def with_header(**changes: object) -> bytes:
    magic, header, body = some_trace().pack().split(b"\n", 2)
    return b"\n".join((magic, json.dumps(json.loads(header) | changes).encode(), body))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "this is no trace"),
        (some_trace().pack().replace(MAGIC, b"paramstore-trace 9"), "begins with b'paramstore-trace 9'"),
        (some_trace().pack()[:-3], "cut off"),
        (with_body(b"\x01\x00\x00\x00"), "multiple of 5"),
        (with_body(b"\x01\x00\x00\x00\x08"), "above 10"),
        (with_body(b"\x09\x00\x00\x00\x00"), "9 is not a valid"),
        (with_body(b"\x01\x02\x00\x00\x00"), "index out of range"),
        (with_header(experts=0), "experts=0"),
        (with_header(colour="red"), "colour"),
    ],
)
def test_what_is_no_trace_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        unpack_trace(content)
