"""Numbers that lie and names that mean mischief, in every field of every request: a typed answer, and nothing else happens.

Lengths of frames that lie are in `tests/wire/test_codec.py`, what a body only promises and random mixtures of all of it in
`tests/faults/test_frames.py`, ranges of upload memory in `tests/daemon/test_session_memory.py`.
"""

from __future__ import annotations

import asyncio
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paramstore.errors import CLASSES, ParamStoreError, ProtocolError
from paramstore.wire import messages as m
from paramstore.wire.codec import LENGTH, encode
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.wire.raw_client import RawClient

pytestmark = pytest.mark.slow

NAME = "moe"
LIES = (1 << 31, (1 << 31) - 1, 1 << 32, (1 << 32) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -(1 << 31), -(1 << 63))
UPLOAD_BYTES = 1 << 20
LIMIT_S = 30.0
GROWTH_BYTES_MAX = 64 << 20
SCHEMA = {"kind": "param", "fields": [["w", [4], "float32"]], "gradient_dtype": ""}
TRUE: dict[str, Any] = {
    "handle": 1, "name": NAME, "mode": "read", "schema": SCHEMA, "layers": [0], "experts": 1, "size_bytes": 4096, "key": (0, 0),
    "keys": [(0, 0)], "part": "param", "segment": 1, "offset_bytes": 0, "entries": [], "deadline_s": None, "timeout_s": 0.05,
    "leases": [], "target": 0, "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "grad_scale": 1.0,
    "is_wanted": True, "step": 1, "extra": b"", "heat": b"", "segments": [], "resident": [], "touched": [], "bytes_resident": 0,
    "namespace": NAME, "host_bytes": None, "at": None, "bytes_per_s": None, "rank": 0, "world_size": 1, "group": "g",
    "is_resumed": False, "is_last": False, "options": None, "param_visits": ((0, "routed"),), "optim_visits": ((0, "gathered"),),
    "min_lease_slots": 0, "max_lease_slots": 0, "after": 0, "sequence": 0, "is_counted": True, "count": 1, "kept": 0,
}  # fmt: skip
"""A value of each field that no one would object to."""
REQUESTS: tuple[type[m.Message], ...] = tuple(
    cls for cls in typing.get_args(m.Request) if cls not in (m.Hello, m.CloseNamespace)
)
BAD_NAMES = (
    "", ".", "..", "../moe", "moe/../moe", "/etc/passwd", "moe\0", "\0", "moe\n", "a" * 65, "x" * (64 << 10), "mœ", "\u202emoe",
    "%2e%2e",
)  # fmt: skip
BAD_BYTES = (b"\xc0\xae\xc0\xae\xc0\xaf", b"\xed\xa0\x80\xed\xb0\x80", b"\xff\xfe\x00moe\x00", b"\xf8\x88\x80\x80\x80")
"""Overlong dots and a slash, surrogates, a byte order mark, five bytes for one character."""


def lying(value: object, kind: Any, lie: int) -> Iterator[object]:
    """`value` with each of its whole numbers in turn replaced by `lie`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is int or (int in arguments and origin is not list and origin is not tuple):
        yield lie
    elif origin is typing.Annotated:
        yield from lying(value, arguments[0], lie)
    elif origin is tuple and arguments[-1] is Ellipsis:
        truth = value[0] if isinstance(value, tuple) and value else ()
        yield from ((item,) for item in lying(truth, arguments[0], lie))
    elif origin is tuple:
        truth = value if isinstance(value, tuple) else (0,) * len(arguments)
        for index in (index for index, part in enumerate(arguments) if part is int):
            yield (*truth[:index], lie, *truth[index + 1 :])
    elif origin is list:
        truth = value[0] if isinstance(value, list) and value else 0
        yield from ([item] for item in lying(truth, arguments[0], lie))
    else:
        for inner in arguments:
            if typing.get_origin(inner) is list:
                yield from lying(value, inner, lie)


def lies(segment: int) -> dict[str, m.Message]:
    """Every request, true but for one number. ids are set when they are sent. segment: of upload memory of the session."""
    found: dict[str, m.Message] = {}
    true = {**TRUE, "id": 1, "modes": [(0, "host")], "segment": segment, "entries": [(0, 0, segment, 0)]}
    for cls in REQUESTS:
        truth = cls(**{field.name: true[field.name] for field in msgspec.structs.fields(cls)})
        for field in msgspec.structs.fields(cls):
            if field.name in ("id", "schema"):
                continue
            for lie in LIES:
                for number, value in enumerate(lying(getattr(truth, field.name), field.type, lie)):
                    message = msgspec.structs.replace(truth, **{field.name: value})
                    if isinstance(message, m.CreateNamespace):
                        message.name = "lies"
                    found[f"{cls.__name__}.{field.name}[{number}]={lie}"] = message
    return found


def resident_bytes(pid: int) -> int:
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) << 10


async def outcome(client: RawClient, message: Any) -> str:
    """The name of the error, "Done", or "" of a message without an answer."""
    if "id" not in message.__struct_fields__:
        await client.send(message)
        return ""
    message.id = client.next_id()
    try:
        await client.ask(message)
    except ParamStoreError as error:
        return type(error).__name__ if "internal error" not in str(error) else str(error)
    return "Done"


@pytest.mark.parametrize("mode", ["read", "write"])
def test_every_number_that_lies_is_answered_by_a_typed_error_or_means_nothing(mode: str, served: DaemonProcess) -> None:
    before_bytes = resident_bytes(served.pid)

    async def scenario() -> dict[str, str]:
        client = RawClient.connect(served.socket)
        await client.hello()
        await client.request(m.OpenNamespace, NAME, mode)
        uploaded: m.Uploaded = await client.request(m.OpenUpload, UPLOAD_BYTES)
        try:
            return {name: await outcome(client, message) for name, message in lies(uploaded.segment).items()}
        finally:
            client.close()

    found = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    wrong = {name for name, what in found.items() if what not in ("Done", "") and what not in CLASSES}
    assert len(found) > 300
    assert wrong == set()
    refused = sum(what not in ("Done", "") for what in found.values())
    assert refused > len(found) // 2, found
    with_memory = ("OpenUpload.", "Read.", "Push.", "InitializePut.")
    assert [name for name, what in found.items() if name.startswith(with_memory) and what == "Done"] == []
    assert resident_bytes(served.pid) - before_bytes < GROWTH_BYTES_MAX


def naming(name: str) -> list[m.Message]:
    """Every request that has a name in it, with this one."""
    return [
        m.OpenNamespace(0, name, "read"), m.OpenNamespace(0, NAME, name), m.CreateNamespace(0, name, SCHEMA, [0], 1),
        m.CreateNamespace(0, "new", {**SCHEMA, "kind": name}, [0], 1),
        m.CreateNamespace(0, "new", {**SCHEMA, "fields": [["w", [4], name]]}, [0], 1),
        m.CreateNamespace(0, "new", {name: [["w", [4], "float32"]]}, [0], 1),
        m.Verify(0, name), m.Acquire(0, 1, [(0, 0)], name, 0.05), m.Prefetch(0, 1, [(0, 0)], name), m.Evict(0, 1, None, name),
    ]  # fmt: skip


def files_of(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))


@pytest.mark.parametrize("name", [*BAD_NAMES, "__class__", "os.system", "torch.load"], ids=lambda name: repr(name[:20]))
def test_every_name_that_means_mischief_is_refused_and_makes_no_file(
    name: str, served: DaemonProcess, clients: list[RawClient]
) -> None:
    before = files_of(served.directory.parent)

    async def scenario() -> list[str]:
        client = RawClient.connect(served.socket)
        clients.append(client)
        await client.hello()
        await client.request(m.OpenNamespace, NAME, "read")
        return [await outcome(client, message) for message in naming(name)]

    good = re.fullmatch(r"[\w.]+", name, re.ASCII) and set(name) != {"."} and len(name) <= 64
    allowed = {"Done"} if good else set()  # a harmless name is one that a namespace may have
    found = asyncio.run(scenario())
    assert set(found) <= {"UnknownNamespace", "ConfigError", "SchemaMismatch"} | allowed, found
    assert files_of(served.directory.parent) == before


@pytest.mark.parametrize("name", BAD_BYTES, ids=repr)
def test_a_name_that_is_no_text_fails_the_request_that_has_it(
    name: bytes, served: DaemonProcess, clients: list[RawClient]
) -> None:
    body = bytes(encode(m.OpenNamespace(7, "x" * len(name), "read")))[LENGTH.size :]
    wrong = body.replace(b"x" * len(name), name)
    assert wrong != body

    async def scenario() -> None:
        client = RawClient.connect(served.socket)
        clients.append(client)
        await client.hello()
        await client.send_bytes(LENGTH.pack(len(wrong)) + wrong)
        with pytest.raises(ProtocolError, match="not a request"):
            await client.result(7)
        assert await client.request(m.Namespaces)

    asyncio.run(scenario())
