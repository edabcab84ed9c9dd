"""A verify over a session: its answer, its progress, and what ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paramstore.errors import CapacityError, ConfigError, TicketCancelled, UnknownNamespace
from paramstore.wire import messages as m

AtDesk = Callable[..., None]
SLOWLY = 1
"""Bytes a second: a scrub that reads nothing as long as a test lasts."""


def test_the_answer_tells_what_was_read_and_found(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        await desk.create(client)
        located = desk.store.namespaces["moe"].steps.ledger.at((0, 2), 1)
        desk.machine.disks[0].corrupt(located.extent.offset_bytes)
        result = await client.request(m.Verify)
        assert (result["records"], result["found"], result["state"]) == (4, 1, "done")
        (finding,) = result["findings"]
        assert (finding["namespace"], finding["key"], finding["steps"]) == ("moe", [0, 2], [1])
        assert (finding["volume"], finding["offset_bytes"]) == (0, located.extent.offset_bytes)
        assert (await client.request(m.Verify, "moe", [(0, 1), (0, 3)]))["records"] == 2
        with pytest.raises(UnknownNamespace):
            await client.request(m.Verify, "nowhere")
        with pytest.raises(ConfigError, match="bytes_per_s=0"):
            await client.request(m.Verify, "moe", None, 0)

    at_desk(scenario)


def test_progress_is_in_the_stats_and_a_cancel_ends_it(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client, other = await desk.client(), await desk.client()
        await desk.create(client)
        await client.send(m.Verify(700, None, None, SLOWLY))
        await desk.until(lambda: desk.service.scrubber.stats()["running"])
        progress = (await other.request(m.Stats))["verify"]
        assert (progress["running"]["records"], progress["running"]["bytes_per_s"], progress["last"]) == (0, SLOWLY, None)
        with pytest.raises(CapacityError, match="one at a time"):
            await other.request(m.Verify)
        await client.send(m.Cancel(700))
        with pytest.raises(TicketCancelled):
            await client.result(700)
        progress = (await other.request(m.Stats))["verify"]
        assert (progress["running"], progress["last"]["state"]) == (None, "cancelled")
        assert (await other.request(m.Verify))["records"] == 4

    at_desk(scenario)


def test_it_ends_with_the_session_that_asked(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client, other = await desk.client(), await desk.client()
        await desk.create(other)
        await client.send(m.Verify(700, None, None, SLOWLY))
        await desk.until(lambda: desk.service.scrubber.stats()["running"])
        client.close()
        await desk.until(lambda: not desk.service.scrubber.stats()["running"])
        assert (await other.request(m.Verify))["found"] == 0

    at_desk(scenario)
