"""Frames: whatever a peer sends, the outcome is a message or ProtocolError."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import ClassVar, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramstore.errors import ProtocolError
from paramstore.wire.codec import (
    FIRST_FRAME_BYTES_MAX,
    FRAME_BYTES_MAX,
    BrokenRequest,
    FrameDecoder,
    broken_request,
    decode_answer,
    decode_request,
    encode,
)
from paramstore.wire.messages import Acquire, Answer, Commit, Done, Failed, Hello, Message, Namespaces, Push, Request, Stats

LENGTH = struct.Struct("<I")
MESSAGES = st.sampled_from(
    [
        Hello(1, "paramstore", 1, 0, 7),
        Acquire(2, 1, [(0, 1), (3, 4)], "param", 1.5),
        Commit(3, 1, 10, b"x" * 300),
        Done(4, {"a": [1, None, {"b": 2.5}]}),
        Failed(5, "StepFailed", "why"),
    ]
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
TAGS = sorted({str(kind.__struct_config__.tag) for kind in (*get_args(Request), *get_args(Answer))})


def body(message: Message) -> bytes:
    return bytes(encode(message)[LENGTH.size :])


def decodes_or_refuses(data: bytes) -> None:
    broken_request(data)
    for decode in (decode_request, decode_answer):
        with suppress(ProtocolError):
            assert isinstance(decode(data), Message)


# --- encode


class Grown(Message, tag="grown"):
    """A message that two fields were added to."""

    ADDED_FIELDS: ClassVar[int] = 2

    id: int
    kept: int = 5
    first: int | None = None
    second: int = 3


@pytest.mark.parametrize(
    ("message", "sent"),
    [
        (Grown(1), ["grown", 1, 5]),
        (Grown(1, 6), ["grown", 1, 6]),
        (Grown(1, 5, 0), ["grown", 1, 5, 0]),
        (Grown(1, 5, None, 4), ["grown", 1, 5, None, 4]),
    ],
)
def test_added_fields_are_sent_only_where_they_say_something(message: Grown, sent: list[object]) -> None:
    """A peer of an older minor knows the others, and takes no more."""
    assert msgspec.msgpack.decode(body(message)) == sent
    assert msgspec.msgpack.decode(body(message), type=Grown) == message


def test_a_frame_is_the_length_of_the_body_and_the_body() -> None:
    frame = encode(Namespaces(1))
    assert LENGTH.unpack_from(frame)[0] == len(frame) - LENGTH.size


def test_a_message_above_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match=f"Done takes .* bytes, the limit is {FRAME_BYTES_MAX}"):
        encode(Done(1, bytes(FRAME_BYTES_MAX)))


def nested() -> list[object]:
    inner: list[object] = []
    for _ in range(100_000):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    "message",
    [
        Commit(1, 1, 1 << 64), Commit(1, 1, 1, object()), Done(1, nested()),  # type: ignore[arg-type]
        Hello(1, "paramstore", 1, 0, 7, "\ud800"),
    ],
    ids=["number", "object", "depth", "text"],
)  # fmt: skip
def test_a_value_that_cannot_travel_is_a_protocol_error(message: Message) -> None:
    with pytest.raises(ProtocolError, match="cannot be sent"):
        encode(message)


# --- bodies


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_refused(data: bytes) -> None:
    decodes_or_refuses(data)


@pytest.mark.slow
@given(st.sampled_from(TAGS), st.lists(VALUES, max_size=8))
def test_a_known_tag_with_any_values_is_a_message_or_refused(tag: str, values: list[object]) -> None:
    decodes_or_refuses(msgspec.msgpack.encode([tag, *values]))


@given(MESSAGES, st.data())
def test_a_message_with_changed_bytes_is_a_message_or_refused(message: Message, data: st.DataObject) -> None:
    changed = bytearray(body(message))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_refuses(bytes(changed))


@given(MESSAGES, st.data())
def test_a_truncated_message_is_refused(message: Message, data: st.DataObject) -> None:
    whole = body(message)
    short = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for decode in (decode_request, decode_answer):
        with pytest.raises(ProtocolError):
            decode(short)


@pytest.mark.parametrize(
    "value",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 items
        b"\xdf\xff\xff\xff\xff",  # a map of 2^32 items
        b"\xc6\xff\xff\xff\xff",  # 2^32 bytes
        b"\xdb\xff\xff\xff\xff",  # a text of 2^32 bytes
        b"\x91" * 200_000,  # nested too deeply
        b"\x81\x80\x01",  # a map as key of a map
        b"\xa2\xff\xfe",  # no UTF-8
        b"\xc1",  # no type
        b"\xc7\x0c\xff" + b"\xff" * 12,  # an impossible time
    ],
)
def test_a_hostile_value_is_refused(value: bytes) -> None:
    with pytest.raises(ProtocolError, match="not an answer"):
        decode_answer(b"\x93\xa4done\x01" + value)


def test_a_request_is_no_answer_and_the_reverse() -> None:
    with pytest.raises(ProtocolError, match="not an answer"):
        decode_answer(body(Namespaces(1)))
    with pytest.raises(ProtocolError, match="not a request"):
        decode_request(body(Done(1)))


def test_too_many_items_are_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_request(msgspec.msgpack.encode(["stats", 1, 2]))


@pytest.mark.parametrize(
    ("items", "told"),
    [
        (["push", 7, 3, "wrong"], BrokenRequest(Push, 7, 3)),
        (["push", 7, "wrong", []], BrokenRequest(Push, 7, None)),
        (["stats", 7, 8], BrokenRequest(Stats, 7, 8)),
        (["push", 7], BrokenRequest(Push, 7, None)),
        (["push", "7", 3, []], None),
        (["push"], None),
        (["device", 1, [], [], None], None),
        (["nothing", 1, 2], None),
    ],
)
def test_a_body_that_is_no_request_says_by_its_beginning_which_one_it_was_meant_to_be(
    items: list[object], told: BrokenRequest | None
) -> None:
    assert broken_request(msgspec.msgpack.encode(items)) == told
    assert broken_request(msgspec.msgpack.encode(items)[:-1]) is None, "it ends too soon"


# --- frames


@settings(max_examples=50)
@given(st.lists(MESSAGES, max_size=6), st.data())
def test_a_stream_cut_anywhere_gives_the_same_bodies(messages: list[Message], data: st.DataObject) -> None:
    stream = b"".join(encode(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = FrameDecoder()
    bodies = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        bodies += decoder.feed(stream[start:end])
    assert bodies == [body(message) for message in messages]
    assert decoder.pending_bytes == 0


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_a_stream_of_anything_is_bodies_or_refused(pieces: list[bytes]) -> None:
    decoder = FrameDecoder(limit_bytes=64)
    with suppress(ProtocolError):
        for piece in pieces:
            assert all(len(found) <= 64 for found in decoder.feed(piece))
            assert decoder.pending_bytes < 64 + LENGTH.size


@pytest.mark.parametrize("length", [FIRST_FRAME_BYTES_MAX + 1, 1 << 31, (1 << 32) - 1])
def test_a_length_above_the_limit_is_refused_before_its_body_comes(length: int) -> None:
    decoder = FrameDecoder(FIRST_FRAME_BYTES_MAX)
    with pytest.raises(ProtocolError, match=f"frame of {length} bytes; the limit is {FIRST_FRAME_BYTES_MAX}"):
        list(decoder.feed(LENGTH.pack(length)))


def test_bodies_before_an_oversized_frame_are_delivered() -> None:
    decoder = FrameDecoder(16)
    bodies = decoder.feed(LENGTH.pack(2) + b"ok" + LENGTH.pack(17))
    assert next(bodies) == b"ok"
    with pytest.raises(ProtocolError):
        next(bodies)


def test_the_limit_may_be_raised_between_two_frames() -> None:
    decoder = FrameDecoder(2)
    bodies = decoder.feed(LENGTH.pack(2) + b"hi" + LENGTH.pack(5) + b"hello")
    assert next(bodies) == b"hi"
    decoder.limit_bytes = 5
    assert list(bodies) == [b"hello"]


def test_an_empty_frame_is_an_empty_body() -> None:
    assert list(FrameDecoder().feed(LENGTH.pack(0))) == [b""]
