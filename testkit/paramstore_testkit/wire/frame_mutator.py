"""Makes frames that no correct peer sends, from correct ones. Everything random comes from one `Random`.

`FrameMaker` makes messages of every class by their field types, so that new messages are mutated without a change here. `mutated`
does to a frame what broken peers and wires do: bits and bytes, cuts, doubled and exchanged pieces, other frames' pieces, msgpack
heads that promise more than comes, and lengths that lie.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from random import Random
from typing import Any

import msgspec

from paramstore.wire import messages as m
from paramstore.wire.codec import LENGTH, encode

NUMBERS = (0, 1, 2, 3, 7, 255, 4096, 65536, -1, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
FLOATS = (0.0, 0.5, 1.0, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))
WORDS = ("", "evil", "param", "optim", "read", "write", "master", "x" * 65, "../evil", "\0", "\u202e", "paramstore")
HEADS = (
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01",
    b"\xdd\x00\x10\x00\x00", b"\xdc\xff\xff", b"\xc1", b"\x91" * 300, b"\x81\xa1a" * 200, b"\xd8\x05" + b"\0" * 16, b"\xc0",
)  # fmt: skip
"""Starts of msgpack values that promise too much, nest deep, or are invalid."""
LENGTHS = (0, 1, 3, 1 << 12, 1 << 20, (8 << 20) + 1, 1 << 31, (1 << 32) - 1)
LIST_MAX = 4
DEPTH_MAX = 3


class FrameMaker:
    """Messages with random values in every field."""

    def __init__(self, random: Random, union: Any) -> None:
        self._random = random
        self.classes: tuple[type[m.Message], ...] = typing.get_args(union)
        self._fields = {cls: msgspec.structs.fields(cls) for cls in self.classes}

    def message(self, cls: type[m.Message] | None = None) -> m.Message:
        """Makes a message of `cls`, or of any class."""
        cls = cls or self._random.choice(self.classes)
        return cls(*(self._value(field.type, 0) for field in self._fields[cls]))

    def frame(self) -> bytes:
        return bytes(encode(self.message()))

    def _value(self, kind: Any, depth: int) -> Any:
        random = self._random
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin in (types.UnionType, typing.Union):
            return self._value(random.choice(arguments), depth)
        if origin is typing.Annotated:
            return self._limited(arguments[0], arguments[1:], depth)
        if origin is list:
            return [self._value(arguments[0], depth + 1) for _ in range(random.randrange(LIST_MAX))]
        if origin is tuple and arguments[-1] is Ellipsis:
            return tuple(self._value(arguments[0], depth + 1) for _ in range(random.randrange(LIST_MAX)))
        if origin is tuple:
            return tuple(self._value(part, depth + 1) for part in arguments)
        if origin is dict:
            return {random.choice(WORDS): self._value(Any, depth + 1) for _ in range(random.randrange(LIST_MAX))}
        if kind is Any:
            choices = [int, str, float, bool, bytes, types.NoneType]
            if depth < DEPTH_MAX:
                choices += [list[Any], dict[str, Any]]
            return self._value(random.choice(choices), depth)
        return self._plain(kind)

    def _limited(self, kind: Any, limits: Iterable[msgspec.Meta], depth: int) -> Any:
        """A value that is not less than `limits` say, and neither shorter nor longer."""
        value = self._value(kind, depth)
        for limit in limits:
            value = value if limit.max_length is None else value[: limit.max_length]
            while limit.min_length is not None and len(value) < limit.min_length:
                value = self._value(kind, depth)
            value = value if limit.ge is None or value >= limit.ge else limit.ge  # NaN is not
        return value

    def _plain(self, kind: Any) -> Any:
        random = self._random
        if kind is int:
            return random.choice(NUMBERS) if random.random() < 0.5 else random.randrange(8)
        if kind is float:
            return random.choice(FLOATS)
        if kind is bool:
            return random.random() < 0.5
        if kind is str:
            return random.choice(WORDS)
        if kind is bytes:
            return random.randbytes(random.randrange(16))
        assert kind is types.NoneType, f"no random value of type {kind!r}"
        return None


class Mutator:
    """Breaks frames, chosen from a fixed set of correct ones."""

    def __init__(self, random: Random, frames: Iterable[bytes]) -> None:
        self._random = random
        self._bodies = [frame[LENGTH.size :] for frame in frames]

    def mutated(self) -> bytes:
        """Makes a broken frame: mostly its length is that of its broken body, sometimes the length lies."""
        random = self._random
        body = bytearray(random.choice(self._bodies))
        for _ in range(1 + (random.random() < 0.3)):
            self._break(body)
        if random.random() < 0.9:
            return LENGTH.pack(len(body)) + body
        return LENGTH.pack(random.choice(LENGTHS)) + body

    def _break(self, body: bytearray) -> None:
        random = self._random
        choice = random.randrange(8)
        at = random.randrange(len(body)) if body else 0
        if choice == 0 and body:
            body[at] ^= 1 << random.randrange(8)
        elif choice == 1 and body:
            body[at] = random.randrange(256)
        elif choice == 2:
            del body[at:]
        elif choice == 3:
            body[at:at] = body[at : at + random.randrange(32)]
        elif choice == 4:
            body[:] = body[at:] + body[:at]
        elif choice == 5:
            other = random.choice(self._bodies)
            body[at:] = other[random.randrange(len(other)) :]
        elif choice == 6:
            body[at : at + 1] = random.choice(HEADS)
        else:
            del body[at : at + 1 + random.randrange(8)]


def cut(stream: bytes, random: Random, piece_bytes_max: int) -> Iterable[bytes]:
    """Cuts the stream into pieces, as a socket may bring them."""
    start = 0
    while start < len(stream):
        end = start + random.randrange(1, piece_bytes_max + 1)
        yield stream[start:end]
        start = end
