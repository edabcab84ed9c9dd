"""A session over a socket pair: what a peer may say, and what it is answered."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from paramstore.daemon import session as session_module
from paramstore.errors import (
    CapacityError,
    ParamStoreError,
    ProtocolError,
    SchemaMismatch,
    StepFailed,
    UnknownKey,
    UnknownNamespace,
    VersionMismatch,
)
from paramstore.wire import messages as m
from paramstore.wire.codec import FIRST_FRAME_BYTES_MAX, FRAME_BYTES_MAX, LENGTH, encode
from paramstore_testkit.trial import telling
from paramstore_testkit.wire.raw_client import ConnectionEnded

AtDesk = Callable[..., None]
GARBAGE_FRAMES = 2000
ADAMW = (1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0)


def framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def failure(answers: list[m.Message]) -> m.Failed:
    (only,) = answers
    assert isinstance(only, m.Failed)
    return only


# --- the first frame


def test_a_hello_is_welcomed_with_what_the_client_must_know(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        welcome = await desk.connect().hello()
        assert welcome["major"] == m.PROTOCOL_MAJOR
        assert welcome["pid"] == os.getpid()
        assert welcome["store_uuid"] == desk.store.store_uuid.hex()
        assert welcome["wait_timeout_s"] == desk.machine.config.wait_timeout_s

    at_desk(scenario)


def test_a_client_of_another_version_is_told_which_to_install_and_disconnected(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = desk.connect()
        with pytest.raises(VersionMismatch, match=rf"{m.PROTOCOL_MAJOR + 1}\.7.*install the same version"):
            await client.ask(m.Hello(1, m.MAGIC, m.PROTOCOL_MAJOR + 1, 7, 1))
        assert await client.end() == []
        assert desk.gone == desk.sessions

    at_desk(scenario)


@pytest.mark.parametrize(
    "frame",
    [
        framed(b"GET / HTTP/1.1\r\n\r\n"), framed(b""), framed(b"\x91\xa4nope"), bytes(encode(m.Stats(1))),
        bytes(encode(m.Hello(1, "otherstore", m.PROTOCOL_MAJOR, 0, 1))), framed(b"\x91" * (FIRST_FRAME_BYTES_MAX - 1)),
    ],
)  # fmt: skip
def test_a_first_frame_that_is_no_hello_ends_the_session_with_the_reason(frame: bytes, at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = desk.connect()
        await client.send_bytes(frame)
        assert failure(await client.end()).error == "ProtocolError"
        assert desk.gone == desk.sessions

    at_desk(scenario)


def test_nobody_who_was_not_welcomed_gets_a_large_frame_in(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = desk.connect()
        await client.send_bytes(LENGTH.pack(FIRST_FRAME_BYTES_MAX + 1))
        assert str(FIRST_FRAME_BYTES_MAX) in failure(await client.end()).message

    at_desk(scenario)


def test_a_client_that_says_nothing_is_disconnected_in_time(at_desk: AtDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "HELLO_TIMEOUT_S", 0.01)

    async def scenario(desk: Any) -> None:
        silent, slow = desk.connect(), desk.connect()
        await slow.send_bytes(encode(m.Hello(1, m.MAGIC, m.PROTOCOL_MAJOR, 0, 1))[:-1])
        for client in (silent, slow):
            assert "no hello within" in failure(await client.end()).message

    at_desk(scenario)


def test_a_welcomed_client_may_be_silent(at_desk: AtDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "HELLO_TIMEOUT_S", 0.01)

    async def scenario(desk: Any) -> None:
        known, silent = await desk.client(), desk.connect()
        await silent.end()
        assert await known.request(m.Namespaces) == []

    at_desk(scenario)


def test_a_second_hello_ends_the_session(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        await client.send(m.Hello(2, m.MAGIC, m.PROTOCOL_MAJOR, 0, 1))
        assert "hello" in failure(await client.end()).message

    at_desk(scenario)


# --- requests and answers


def test_frames_in_pieces_are_answered_in_order(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        data = b"".join(bytes(encode(m.Namespaces(number))) for number in range(10, 20))
        for start in range(0, len(data), 3):
            await client.send_bytes(data[start : start + 3])
            await asyncio.sleep(0)
        assert [(await client.answer()).id for _ in range(10)] == list(range(10, 20))

    at_desk(scenario)


def test_an_oversized_frame_ends_the_session_with_the_limit(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        await client.send_bytes(LENGTH.pack(FRAME_BYTES_MAX + 1))
        assert str(FRAME_BYTES_MAX) in failure(await client.end()).message

    at_desk(scenario)


def test_garbage_after_the_hello_ends_only_the_session_that_sent_it(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        good, bad = await desk.client(), await desk.client()
        await bad.send_bytes(framed(b"\xc1\xc1\xc1"))
        assert failure(await bad.end()).id == 0
        assert await good.request(m.Namespaces) == []
        assert desk.gone == [desk.sessions[1]]

    at_desk(scenario)


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)
        desk.machine.workers.pause()
        await client.send(m.Evict(500, handle))
        await client.send(m.Acquire(501, handle, [(0, 0)], "param", 5.0))
        await client.send(m.Prefetch(501, handle, [(0, 1)], "param"))
        await client.send(m.Acquire(500, handle, [(0, 1)], "param", 5.0))
        for _ in range(2):
            refused = await client.answer()
            assert "in use" in refused.message
        desk.machine.workers.resume()
        answers = [await client.answer(), await client.answer()]
        assert {(type(answer), answer.id) for answer in answers} == {(m.Done, 500), (m.Granted, 501)}
        with pytest.raises(ProtocolError, match="in use"):
            await client.ask(m.Stats(501))  # a lease is named by its request's id until it is released

    at_desk(scenario)


def test_an_id_that_cannot_name_a_request_is_refused(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        for request_id in (0, -1):
            with pytest.raises(ProtocolError, match="above 0"):
                await client.ask(m.Stats(request_id))
            client.unasked.clear()

    at_desk(scenario)


def test_too_many_requests_under_way_are_refused_not_kept(at_desk: AtDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "TASKS_MAX", 4)

    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)
        await client.request(m.Evict, handle)
        desk.machine.workers.pause()
        for request_id in range(100, 110):
            await client.send(m.Acquire(request_id, handle, [(0, 0)], "param", 5.0))
        refused = [await client.answer() for _ in range(6)]
        assert all("more than 4" in answer.message for answer in refused)
        desk.machine.workers.resume()
        granted = [await client.answer() for _ in range(4)]
        assert {type(answer) for answer in granted} == {m.Granted}

    at_desk(scenario)


def test_a_bug_behind_one_request_is_told_and_ends_nothing(at_desk: AtDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()

        def stats() -> dict[str, object]:
            raise ZeroDivisionError("a bug")

        async def commit(*arguments: object) -> None:
            stats()

        handle = await desk.create(client)
        monkeypatch.setattr(desk.store, "stats", stats)
        monkeypatch.setattr(desk.store.committer, "commit", commit)
        for request in (m.Stats(600), m.Commit(601, handle, 2)):
            with pytest.raises(ParamStoreError, match=r"internal error.*a bug"):
                await client.ask(request)
        assert await client.request(m.Steps, handle) == [1]

    at_desk(scenario)


def test_an_answer_larger_than_a_frame_is_an_error_not_a_silence(at_desk: AtDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)

        async def evict(*arguments: object) -> bytes:
            return bytes(FRAME_BYTES_MAX)

        monkeypatch.setattr(desk.store, "evict", evict)
        monkeypatch.setattr(desk.service, "stats", lambda: bytes(FRAME_BYTES_MAX))
        for request in (m.Stats(600), m.Evict(601, handle)):
            with pytest.raises(ProtocolError, match="ask in parts"):
                await client.ask(request)

    at_desk(scenario)


def test_every_error_reaches_the_one_who_asked_by_its_class(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)
        cases: list[tuple[type[ParamStoreError], Callable[..., Any], tuple[Any, ...]]] = [
            (UnknownNamespace, m.OpenNamespace, ("nobody", "read")),
            (UnknownKey, m.Acquire, (handle, [(0, 99)], "param", 1.0)),
            (UnknownKey, m.Prefetch, (handle, [(9, 0)], "param")),
            (SchemaMismatch, m.Acquire, (handle, [(0, 0)], "optim", 1.0)),
            (SchemaMismatch, m.Prefetch, (handle, [(0, 0)], "nothing")),
            (SchemaMismatch, m.CreateNamespace, ("other", {"kind": "sgd"}, [0], 1)),
            (CapacityError, m.OpenUpload, (1 << 50,)),
            (ProtocolError, m.OpenUpload, (-1,)),
        ]
        for error, make, arguments in cases:
            with pytest.raises(error):
                await client.request(make, *arguments)
        assert await client.request(m.Steps, handle) == [1]

    at_desk(scenario)


def test_one_way_messages_are_not_answered_whatever_they_name(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)
        for message in (
            m.Release([1, 99, -1]), m.Cancel(99), m.Unmapped([1, 2, 99]), m.DeviceReport(99, [], [], 0),
            m.DeviceReport(handle, [(0, 99)], [], 0), m.DeviceReport(handle, [(0, 0)], [(0, 0), (5, 5)], 4096),
            m.ExtentModes(99, [(0, "host")]), m.ExtentModes(handle, [(0, "host")]),
        ):  # fmt: skip
            await client.send(message)
        assert await client.request(m.Steps, handle) == [1]
        assert client.unasked == []
        assert desk.figures()["hbm_bytes"] == 4096
        assert desk.service.extents.stats()["modes"] == {"0": ["host"]}

    at_desk(scenario)


# --- strangers


def mutated(frame: bytes, source: random.Random) -> bytes:
    """`frame` with a few bytes changed, cut out or put in; its length prefix right more often than not."""
    body = bytearray(frame[LENGTH.size :])
    for _ in range(source.randint(1, 4)):
        position = source.randrange(len(body) + 1)
        choice = source.randrange(4)
        if choice == 0 and body:
            body[position - 1] = source.randrange(256)
        elif choice == 1:
            body[position:position] = source.randbytes(source.randint(1, 9))
        elif choice == 2:
            del body[position : position + source.randint(1, 6)]
        else:
            body[position:position] = source.choice((b"\xcb\x7f\xf8" + bytes(6), b"\xcf" + b"\xff" * 8, b"\xc0", b"\xdd\xff\xff"))
    length = len(body) if source.random() < 0.9 else source.randrange(1 << 32)
    return LENGTH.pack(length) + body


def templates(handle: int, segment: int) -> list[m.Message]:
    key = [(0, 0)]
    return [
        m.Namespaces(50), m.CreateNamespace(51, "x", {"kind": "param", "fields": [["w", [4], "float32"]]}, [0], 2),
        m.OpenNamespace(52, "moe", "read"), m.CloseNamespace(53, handle + 100), m.Refresh(54, handle, True),
        m.AwaitStep(76, handle, None, 3, 0.01), m.OpenUpload(55, 4096),
        m.InitializeBegin(56, handle), m.InitializePut(57, handle, (0, 0), segment, 0), m.InitializeEnd(58, handle),
        m.Prefetch(59, handle, key, "param", 1.0), m.Acquire(60, handle, key, "param", 0.01), m.Release([60]), m.Cancel(59),
        m.Push(61, handle, [(0, 0, segment, 0)]), m.GradientNorm(62, handle), m.Apply(63, handle, *ADAMW), m.Abort(64, handle),
        m.WriteBack(65, handle, key), m.Evict(66, handle, key, "param"), m.Protect(67, handle, key, True),
        m.DeclareSchedule(75, handle, ((0, "routed"),), ((0, "gathered"),)),
        m.Commit(68, handle, 5, b"x"), m.Steps(69, handle), m.Extra(70, handle, 1), m.Rollback(71, handle, 1),
        m.Read(72, handle, (0, 0), segment, 0), m.Residency(73, handle), m.Stats(74), m.Unmapped([1]),
        m.DeviceReport(handle, key, key, 1),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_well_behaved_client_sees_nothing_of_thousands_of_wrong_frames(seed: int, at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        source = random.Random(seed)
        good = await desk.client()
        handle = await desk.create(good)
        values = await good.request(m.Acquire, handle, [(0, 1)], "param", 5.0)
        stranger, opened, segment = None, {}, 0
        for number in range(GARBAGE_FRAMES // 2):
            if stranger is None:
                stranger = await desk.client()
                opened = await stranger.request(m.OpenNamespace, "moe", "read")
                segment = await desk.upload(stranger, 1 << 16)
            frame = bytes(encode(source.choice(templates(opened["handle"], segment))))
            try:
                await stranger.send_bytes(mutated(frame, source))
                await stranger.send(m.Namespaces(10_000 + number))
                await asyncio.wait_for(stranger.result(10_000 + number), 0.05)
            except (ParamStoreError, ConnectionEnded, OSError, TimeoutError):
                stranger.close()
                stranger = None
            if number % 20 == 0:
                assert await good.request(m.Steps, handle) == [1]
        again = await good.request(m.Acquire, handle, [(0, 1)], "param", 5.0)
        assert again.slots == values.slots
        await desk.push(good, handle, [(0, 1)])
        assert (await good.request(m.Apply, handle, *ADAMW))["records"] == 1
        assert (await good.request(m.Commit, handle, 2))["step"] == 2

    with telling(lambda: f"seed {seed}"):
        at_desk(scenario)


def test_a_broken_namespace_is_no_reason_to_refuse_other_sessions(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        writer, reader = await desk.client(), await desk.client()
        handle = await desk.create(writer)
        reading = (await reader.request(m.OpenNamespace, "moe", "read"))["handle"]
        desk.store.namespaces["moe"].writing.broken = "an apply failed: disk"
        with pytest.raises(StepFailed, match="rollback"):
            await writer.request(m.Commit, handle, 2)
        assert len((await reader.request(m.Acquire, reading, [(0, 0)], "param", 5.0)).slots) == 1

    at_desk(scenario)
