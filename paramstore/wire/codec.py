"""Frames: a 4-byte little-endian length, then one msgpack message. Size limits are checked before a body is kept.

`FrameDecoder` cuts a byte stream into message bodies; `decode_request` and `decode_answer` turn bodies into messages.
Whatever a peer sends, the outcome is a message or ProtocolError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, get_args

import msgspec

from paramstore.errors import ProtocolError
from paramstore.wire.messages import Answer, Message, Request

LENGTH = struct.Struct("<I")
FRAME_BYTES_MAX = 8 << 20
"""The longest frame: KEYS_MAX keys and the largest `extra` fit; no correct peer sends more."""
FIRST_FRAME_BYTES_MAX = 4096
"""The longest frame until the hello is accepted."""

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_ANSWERED: dict[object, type[Message]] = {
    cls.__struct_config__.tag: cls for cls in get_args(Request) if cls.__struct_fields__[0] == "id"
}
"""The requests that are answered, by tag: those with an id. The others are one-way."""


class _Head(msgspec.Struct, array_like=True):
    """The first items of a request. The decoder skips what follows, which takes no memory."""

    tag: str
    id: int
    handle: msgspec.Raw = msgspec.Raw(b"\xc0")


_head_decoder = msgspec.msgpack.Decoder(_Head)
_handle_decoder = msgspec.msgpack.Decoder(int)


class BrokenRequest(NamedTuple):
    """The request that an unreadable body was meant to be. handle: None where it has none, or none that can be read."""

    kind: type[Message]
    id: int
    handle: int | None


def encode(message: Message) -> bytearray:
    """Makes the frame of `message`. Raises ProtocolError if it would exceed FRAME_BYTES_MAX, or a value cannot be encoded."""
    frame = bytearray(LENGTH.size)
    try:
        _encoder.encode_into(_shortened(message) if message.ADDED_FIELDS else message, frame, LENGTH.size)
    except (OverflowError, RecursionError, TypeError, UnicodeEncodeError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error
    body_bytes = len(frame) - LENGTH.size
    if body_bytes > FRAME_BYTES_MAX:
        raise ProtocolError(f"{type(message).__name__} takes {body_bytes} bytes, the limit is {FRAME_BYTES_MAX}: ask in parts")
    LENGTH.pack_into(frame, 0, body_bytes)
    return frame


def _shortened(message: Message) -> object:
    """The values of a message to send: without those of its ADDED_FIELDS at the end that have their defaults."""
    values = [getattr(message, name) for name in message.__struct_fields__]
    for default in reversed(message.__struct_defaults__[-message.ADDED_FIELDS :]):
        if values[-1] != default:
            break
        values.pop()
    return [message.__struct_config__.tag, *values]


def decode_request(body: bytes | bytearray | memoryview) -> Request:
    try:
        return _request_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a request: {error}") from error


def broken_request(body: bytes | bytearray | memoryview) -> BrokenRequest | None:
    """Finds out which request a body that `decode_request` refused was meant to be; None where its tag and id cannot be read."""
    try:
        head = _head_decoder.decode(body)
        kind = _ANSWERED[head.tag]
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    handle = None
    with suppress(msgspec.DecodeError):
        handle = _handle_decoder.decode(head.handle)
    return BrokenRequest(kind, head.id, handle)


def decode_answer(body: bytes | bytearray | memoryview) -> Answer:
    try:
        return _answer_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not an answer: {error}") from error


def first_body(stream: bytearray | memoryview, start: int = 0, *, limit_bytes: int = FRAME_BYTES_MAX) -> bytes | None:
    """The body of the frame at `start`; None where it is not whole. Raises ProtocolError at a length above the limit."""
    if len(stream) - start < LENGTH.size:
        return None
    (body_bytes,) = LENGTH.unpack_from(stream, start)
    if body_bytes > limit_bytes:
        raise ProtocolError(f"frame of {body_bytes} bytes; the limit is {limit_bytes}")
    begin = start + LENGTH.size
    return bytes(memoryview(stream)[begin : begin + body_bytes]) if len(stream) >= begin + body_bytes else None


class FrameDecoder:
    """Cuts a byte stream into frame bodies. Holds at most one unfinished frame and what one `feed` brought.

    limit_bytes: may be raised once the peer is known (`FIRST_FRAME_BYTES_MAX` before).
    """

    def __init__(self, limit_bytes: int = FRAME_BYTES_MAX) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Yields the bodies that `data` completes, in order. Raises ProtocolError at a length above the limit."""
        self._buffer += data
        start = 0
        try:
            while (body := first_body(self._buffer, start, limit_bytes=self.limit_bytes)) is not None:
                start += LENGTH.size + len(body)
                yield body
        finally:
            del self._buffer[:start]

    @property
    def pending_bytes(self) -> int:
        return len(self._buffer)
