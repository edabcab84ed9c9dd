"""A request that came broken is answered by its error and costs the session nothing else, but that what was sent behind a push, an
apply or an abort is refused until the client starts over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, get_args

import msgspec
import pytest

from paramstore.core.schema import Schema
from paramstore.daemon.handlers import COLLECTIVE, ORDERED
from paramstore.daemon.lost import RELIED_ON, STARTS_OVER
from paramstore.errors import ParamStoreError, ProtocolError, StepDropped, StepFailed, StepMismatch
from paramstore.wire import messages as m
from paramstore.wire.codec import LENGTH, encode
from paramstore_testkit.wire.frame_mutator import FrameMaker
from paramstore_testkit.wire.raw_client import RawClient

AtDesk = Callable[..., None]
WRONG = msgspec.msgpack.Ext(5, b"wrong")
"""A value that no field takes."""
REQUESTS = tuple(cls for cls in get_args(m.Request) if "id" in cls.__struct_fields__)
ADAMW = Schema.adamw({"w": (16, 16)}, param_dtype="float32").describe()
MAKER = FrameMaker(Random(1), m.Request)
ONE_WAY = tuple(cls for cls in get_args(m.Request) if cls not in REQUESTS)


def true(kind: type[m.Message], request_id: int = 0, handle: int = 1) -> m.Message:
    """A correct frame's message, on `handle`."""
    while True:
        message = MAKER.message(kind)
        wanted = {"id": request_id, "handle": handle, "keys": [(0, 0)], "step": 1, "target": 1, "segments": [1], "leases": [1]}
        fields = message.__struct_fields__
        message = msgspec.structs.replace(message, **{name: value for name, value in wanted.items() if name in fields})
        encode(message)
        return message


def framed(items: list[Any]) -> bytes:
    body = msgspec.msgpack.encode(items)
    return LENGTH.pack(len(body)) + body


def broken(message: m.Message, field: str) -> bytes:
    """The frame of `message` with one field that no peer sends."""
    values = [WRONG if name == field else getattr(message, name) for name in message.__struct_fields__]
    return framed([message.__struct_config__.tag, *values])


def broken_ones() -> Iterator[tuple[type[m.Message], str]]:
    for kind in REQUESTS:
        if kind is not m.Hello:
            yield from ((kind, field) for field in kind.__struct_fields__ if field != "id")


async def outcome(client: RawClient, kind: type[m.Message], handle: int) -> str:
    """What the daemon answers: the name of its error, or of its answer."""
    try:
        return type(await client.ask(true(kind, client.next_id(), handle))).__name__
    except ParamStoreError as error:
        return type(error).__name__


async def lose(client: RawClient, kind: type[m.Message], handle: int) -> None:
    request_id = client.next_id()
    message = true(kind, request_id, handle)
    values = [getattr(message, name) for name in message.__struct_fields__]
    await client.send_bytes(framed([message.__struct_config__.tag, *values, "one too many"]))
    with pytest.raises(ProtocolError, match="not a request"):
        await client.result(request_id)


# --- what a broken frame costs


def test_a_broken_request_of_every_kind_fails_and_its_session_lives(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)
        count = 0
        for kind, field in broken_ones():
            request_id = client.next_id()
            await client.send_bytes(broken(true(kind, request_id, handle), field))
            with pytest.raises(ProtocolError, match="not a request"):
                await client.result(request_id)
            count += 1
        assert count > 100
        await client.request(m.Abort, handle)
        assert await client.request(m.Steps, handle) == [1]
        assert (await client.request(m.Acquire, handle, [(0, 0)], "param", 1.0)).slots

    at_desk(scenario)


@pytest.mark.parametrize("cut", ["id", "tag", "one-way", "not open", "in use", "hello", "garbage"])
def test_a_frame_that_is_no_request_of_its_own_ends_the_session(cut: str, at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)
        lease = await client.request(m.Acquire, handle, [(0, 0)], "param", 1.0)
        frames = {
            "id": [broken(true(kind), "id") for kind in REQUESTS],
            "tag": [framed(["nothing", 7, handle]), framed([WRONG, 7, handle]), framed([]), framed(["push"])],
            "one-way": [broken(true(kind), field) for kind in ONE_WAY for field in kind.__struct_fields__],
            "not open": [broken(true(m.Push, number), "entries") for number in (0, -1)],
            "in use": [broken(true(m.Push, lease.id), "entries")],
            "hello": [broken(true(m.Hello, 99), "magic")],
            "garbage": [LENGTH.pack(5) + b"\xc1junk", broken(true(m.Push, 99), "entries")[:-1]],
        }[cut]
        for frame in frames:
            one = client if cut == "in use" else await desk.client()
            await one.send_bytes(LENGTH.pack(len(frame) - LENGTH.size) + frame[LENGTH.size :])
            assert (await one.end())[-1].error == "ProtocolError"  # type: ignore[attr-defined]

    at_desk(scenario)


def test_a_broken_frame_before_the_hello_ends_the_session(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = desk.connect()
        await client.send_bytes(broken(true(m.Push, 1), "entries"))
        assert (await client.end())[-1].id == 0

    at_desk(scenario)


# --- what was sent behind it


@pytest.mark.parametrize("lost", sorted(RELIED_ON, key=str), ids=lambda kind: kind.__name__)
def test_what_relies_on_a_lost_request_is_refused_until_an_abort(lost: type[m.Message], at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle, other = await desk.create(client), await desk.create(client, name="other")
        await desk.push(client, handle, [(0, 0)])
        await lose(client, lost, handle)
        for kind in ORDERED - STARTS_OVER:
            assert await outcome(client, kind, handle) == "StepFailed", kind
        assert await client.request(m.Steps, handle) == [1], "what is not ordered goes on"
        assert await client.request(m.GradientNorm, other) == 0.0, "another handle has lost nothing"
        assert await client.request(m.Abort, handle) == 1
        await desk.push(client, handle, [(0, 0)])
        await client.request(m.Commit, handle, 2)

    at_desk(scenario)


def test_a_lost_request_that_is_not_relied_on_stops_nothing(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)
        for kind, field in broken_ones():
            if kind not in RELIED_ON:
                await client.send_bytes(broken(true(kind, client.next_id(), handle), field))
        assert await client.request(m.GradientNorm, handle) == 0.0

    at_desk(scenario)


def test_only_a_rollback_that_succeeds_ends_the_refusals(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)
        await lose(client, m.Apply, handle)
        with pytest.raises(StepDropped):
            await client.request(m.Rollback, handle, 77)
        with pytest.raises(StepFailed, match=r"\(apply\) came broken.*abort\(\) or rollback\(\)"):
            await client.request(m.Commit, handle, 2)
        await client.request(m.Rollback, handle, 1)
        await client.request(m.Commit, handle, 2)

    at_desk(scenario)


def test_a_lost_request_that_does_not_say_its_handle_stops_all_of_them(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handles = [await desk.create(client), await desk.create(client, name="other")]
        for wrong in (WRONG, 99, None):
            request_id = client.next_id()
            await client.send_bytes(framed(["push", request_id, wrong, WRONG]))
            with pytest.raises(ProtocolError):
                await client.result(request_id)
            for handle in handles:
                with pytest.raises(StepFailed):
                    await client.request(m.GradientNorm, handle)
                await client.request(m.Abort, handle)

    at_desk(scenario)


def test_a_reader_has_lost_nothing_by_a_push(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)
        reader = (await client.request(m.OpenNamespace, "moe", "read"))["handle"]
        for wrong in (WRONG, reader):
            request_id = client.next_id()
            await client.send_bytes(framed(["push", request_id, wrong, WRONG]))
            with pytest.raises(ProtocolError):
                await client.result(request_id)
            assert (await client.request(m.Acquire, reader, [(0, 0)], "param", 1.0)).slots
            assert (await outcome(client, m.GradientNorm, handle) == "StepFailed") == (wrong is WRONG)
            await client.request(m.Abort, handle)

    at_desk(scenario)


def test_before_the_first_commit_initialize_is_the_way_on(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = (await client.request(m.CreateNamespace, "new", ADAMW, [0], 4))["handle"]
        await lose(client, m.Apply, handle)
        with pytest.raises(StepFailed, match=r"before the first commit initialize\(\)"):
            await client.request(m.InitializeEnd, handle)
        await client.request(m.InitializeBegin, handle)
        with pytest.raises(StepFailed, match="was never given a value"):
            await client.request(m.InitializeEnd, handle)

    at_desk(scenario)


# --- ranks


def test_ranks_whose_one_call_came_broken_start_over_together(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        first = await desk.client()
        await first.request(m.CloseNamespace, await desk.create(first))
        clients = [first, await desk.client()]
        asked = [m.OpenRank(client.next_id(), "moe", "write", None, None, rank, 2, "g") for rank, client in enumerate(clients)]
        for client, message in zip(clients, asked, strict=True):
            await client.send(message)
        handles = [(await client.result(message.id))["handle"] for client, message in zip(clients, asked, strict=True)]

        async def together(make: Callable[..., Any], *arguments: Any) -> list[Any]:
            ids = [client.next_id() for client in clients]
            for client, request_id, handle in zip(clients, ids, handles, strict=True):
                await client.send(make(request_id, handle, *arguments))
            return [await client.result(request_id) for client, request_id in zip(clients, ids, strict=True)]

        for is_lost_before in (False, True):
            if is_lost_before:
                await lose(first, m.Push, handles[0])
            waiting = m.Abort(first.next_id(), handles[0])
            await first.send(waiting)  # for the other rank: it is no answer to what is lost after it
            await lose(first, m.Apply, handles[0])
            await clients[1].request(m.Abort, handles[1])
            await first.result(waiting.id)
        with pytest.raises(StepFailed):
            await first.request(m.Commit, handles[0], 2)
        with pytest.raises(StepMismatch):
            await clients[1].request(m.Commit, handles[1], 2)
        await together(m.Rollback, 1)
        await together(m.Commit, 2)

    at_desk(scenario, wait_timeout_s=0.05)


def test_every_ordered_request_has_a_handle() -> None:
    """`LostRequests` knows them by it."""
    assert {*ORDERED, *COLLECTIVE} - {m.CreateRank, m.OpenRank} == ORDERED
    assert all("handle" in kind.__struct_fields__ for kind in ORDERED)
