"""Every message travels and comes back the same, and their kinds cannot be mistaken for each other."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from paramstore.errors import ProtocolError
from paramstore.wire import messages
from paramstore.wire.codec import FRAME_BYTES_MAX, LENGTH, decode_answer, decode_request, encode
from paramstore.wire.messages import EXTRA_BYTES_MAX, KEYS_MAX, Acquire, Answer, Commit, Granted, Message, Push, Request

REQUESTS: tuple[type[Message], ...] = get_args(Request)
ANSWERS: tuple[type[Message], ...] = get_args(Answer)
ONE_WAY = {"Release", "GiveBack", "Cancel", "Unmapped", "DeviceReport", "ExtentModes", "Unmap", "LeaseSlots"}

EXAMPLES: dict[object, Any] = {
    "VisitPairs": ((0, "routed"), (1, "updated")),
    "int": 7,
    "str": "moe",
    "float": 1.5,
    "Seconds": 1.5,
    "bool": True,
    "bytes": b"\0x",
    "Any": {"a": [1, 2.5, None]},
    "Key": (3, 4),
    "Keys": [(0, 1), (2, 3)],
    "list[int]": [1, 2],
    "Layers": [1, 2],
    "dict[str, Any]": {"kind": "param"},
    "list[tuple[int, int]]": [(1, 4096)],
    "list[tuple[int, int, int, int]]": [(1, 2, 3, 4)],
    "Modes": [(0, "host")],
    "ExtentKeys": [(0, 1), (2, 3)],
    "list[tuple[int, int, int, int, int, int]]": [(1, 4096, 8192, 4, 5, (1 << 64) - 1)],
    "list[bytes]": [bytes(8), b"\xff" * 16],
}


def example(kind: type[Message]) -> Message:
    """A message of `kind` with every field set."""
    values = []
    annotations = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).get("__annotations__", {}).items()}
    for field in kind.__struct_fields__:
        annotation = annotations[field].removesuffix(" | None")
        values.append(EXAMPLES[annotation])
    return kind(*values)


def decode(message: Message) -> Message:
    body = encode(message)[LENGTH.size :]
    return decode_request(body) if isinstance(message, REQUESTS) else decode_answer(body)


@pytest.mark.parametrize("kind", [*REQUESTS, *ANSWERS], ids=lambda kind: kind.__name__)
def test_every_message_comes_back_equal(kind: type[Message]) -> None:
    message = example(kind)
    found = decode(message)
    assert type(found) is kind
    assert found == message


def test_every_message_of_the_module_is_a_request_or_an_answer() -> None:
    kinds = {
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, Message) and value is not Message
    }
    assert kinds == {*REQUESTS, *ANSWERS}


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in (*REQUESTS, *ANSWERS)]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("kind", [*REQUESTS, *ANSWERS], ids=lambda kind: kind.__name__)
def test_a_message_has_an_id_first_unless_it_is_one_way(kind: type[Message]) -> None:
    has_id = kind.__struct_fields__[0] == "id"
    assert has_id == (kind.__name__ not in ONE_WAY)


def test_messages_are_arrays_on_the_wire() -> None:
    decoded = msgspec.msgpack.decode(encode(Commit(9, 1, 40, b"e"))[LENGTH.size :])
    assert decoded == ["commit", 9, 1, 40, b"e"]


def test_the_largest_messages_that_the_limits_allow_fit_a_frame() -> None:
    keys = [(4095, 65535)] * KEYS_MAX
    assert decode(Acquire(1 << 40, 1, keys, "optim", 60.0)) is not None
    entries = [(4095, 65535, 1 << 31, 1 << 40)] * KEYS_MAX
    for message in (Push(1 << 40, 1, entries), Granted(1 << 40, entries, []), Commit(1, 1, 1, bytes(EXTRA_BYTES_MAX))):
        assert len(encode(message)) <= FRAME_BYTES_MAX


def test_a_request_with_more_keys_than_a_namespace_has_is_refused_before_they_are_made() -> None:
    frame = encode(messages.Prefetch(1, 2, [(0, expert) for expert in range(messages.KEYS_MAX)], "param"))
    assert len(decode_request(frame[LENGTH.size :]).keys) == messages.KEYS_MAX  # type: ignore[union-attr]
    frame = encode(messages.Evict(1, 2, [(0, expert) for expert in range(messages.KEYS_MAX + 1)]))
    with pytest.raises(ProtocolError, match=str(messages.KEYS_MAX)):
        decode_request(frame[LENGTH.size :])
