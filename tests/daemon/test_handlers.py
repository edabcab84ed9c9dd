"""What single requests of a session run: waits for a newer step, and refreshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paramstore.errors import CapacityError, LeaseError, TicketCancelled
from paramstore.wire import messages as m

AtDesk = Callable[..., None]
FOREVER_S = 1e6


async def pair(desk: Any) -> tuple[Any, int, Any, int]:
    """A writer at step 1 and a reader of it, with their handles."""
    writer, reader = await desk.client(), await desk.client()
    handle = await desk.create(writer)
    return writer, handle, reader, (await reader.request(m.OpenNamespace, "moe", "read"))["handle"]


def waiting(desk: Any) -> int:
    return sum(len(view.awaited) for view in desk.store.namespaces["moe"].views)


def test_a_wait_for_a_step_is_answered_when_it_is_committed(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        writer, handle, reader, reading = await pair(desk)
        await reader.send(m.AwaitStep(700, reading, None, None, FOREVER_S))
        assert await reader.request(m.Steps, reading) == [1], "others are answered meanwhile"
        await writer.request(m.Commit, handle, 5)
        first = await reader.result(700)
        assert first["step"] == 5
        await reader.send(m.AwaitStep(701, reading, None, first["sequence"], FOREVER_S))
        await writer.request(m.Commit, handle, 6)
        assert (await reader.result(701))["step"] == 6

    at_desk(scenario)


def test_a_cancel_or_a_close_ends_a_wait(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        _, _, reader, reading = await pair(desk)
        await reader.send(m.AwaitStep(700, reading, None, None, FOREVER_S))
        await reader.send(m.AwaitStep(701, reading, 9, None, FOREVER_S))
        await reader.send(m.Cancel(700))
        with pytest.raises(TicketCancelled, match="wait for a step"):
            await reader.result(700)
        assert waiting(desk) == 1
        await reader.send(m.CloseNamespace(702, reading))
        with pytest.raises(LeaseError, match="was closed"):
            await reader.result(701)

    at_desk(scenario)


def test_a_session_has_so_many_waits_and_a_cancelled_one_counts_no_more(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        writer, handle, reader, reading = await pair(desk)
        second = (await reader.request(m.OpenNamespace, "moe", "read"))["handle"]
        for number in range(m.STEP_WAITS_MAX):
            await reader.send(m.AwaitStep(1000 + number, (reading, second)[number % 2], None, None, FOREVER_S))
        with pytest.raises(CapacityError, match=f"{m.STEP_WAITS_MAX} waits for a step"):
            await reader.request(m.AwaitStep, reading, None, None, FOREVER_S)
        assert (await writer.request(m.AwaitStep, handle, 0, None, FOREVER_S))["step"] == 1, "others have waits of their own"
        await reader.send(m.Cancel(1000))
        await reader.send(m.AwaitStep(2000, reading, None, None, FOREVER_S))
        await writer.request(m.Commit, handle, 2)
        for request in (*range(1001, 1000 + m.STEP_WAITS_MAX), 2000):
            assert (await reader.result(request))["step"] == 2
        assert waiting(desk) == 0

    at_desk(scenario)


def test_waits_end_with_their_session(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        writer, handle, reader, reading = await pair(desk)
        await reader.send(m.AwaitStep(700, reading, None, None, FOREVER_S))
        await desk.until(lambda: waiting(desk) == 1)
        (view,) = [view for view in desk.store.namespaces["moe"].views if not view.is_writer]
        session = desk.sessions[1]
        reader.close()
        await desk.until(lambda: not session._tasks)
        assert view.awaited == []
        await writer.request(m.Commit, handle, 2)

    at_desk(scenario)


def test_a_refresh_counts_only_for_those_who_ask(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        writer, handle, reader, reading = await pair(desk)
        await desk.push(writer, handle, [(0, 1), (0, 2)])
        await writer.request(m.Apply, handle, 1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0)
        await writer.request(m.Commit, handle, 2)
        assert await reader.request(m.Refresh, reading, True) == {"step": 2, "keys": 2, "bytes": 2 * 4096}
        assert await reader.request(m.Refresh, reading) == 2

    at_desk(scenario)
