"""Upload areas have a limit of their own, and segments of one numbering with those of arenas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from paramstore.config import SEGMENT_ALIGNMENT_BYTES
from paramstore.engine.capacity.upload_budget import UploadBudget
from paramstore.errors import CapacityError, ProtocolError
from paramstore_testkit.disks.machine import PlainMemory
from paramstore_testkit.stores.small_host import MIB, SMALL, CountingMemory, host_tier, namespace_of


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_upload_areas_have_a_limit_of_their_own_that_names_the_size_needed() -> None:
    async def scenario() -> None:
        memory = CountingMemory()
        host = host_tier(memory)
        budget = UploadBudget(host, budget_bytes=4 * MIB)
        budget.open("alice", 1, ())
        assert budget.used_bytes == budget.bytes_of("alice") == SEGMENT_ALIGNMENT_BYTES
        with pytest.raises(CapacityError, match=r"would need 6 MiB, gradient_budget allows 4 MiB .* raise it to 6291456 bytes"):
            budget.open("bob", 3 * MIB, ())
        assert budget.used_bytes == 2 * MIB
        assert len(memory.open) == 1
        budget.open("bob", 2 * MIB, ())
        assert budget.used_bytes == 4 * MIB
        assert host.used_bytes == 0, "not of the host budget"
        host.unmapped("alice")  # it is gone, but something may still be read there
        assert budget.used_bytes == 4 * MIB
        budget.drop("alice")
        assert (budget.used_bytes, budget.bytes_of("alice")) == (2 * MIB, 0)

    run(scenario)


def test_a_segment_without_bytes_is_refused() -> None:
    async def scenario() -> None:
        budget = UploadBudget(host_tier(PlainMemory()), budget_bytes=4 * MIB)
        with pytest.raises(ProtocolError, match="an upload segment of 0 bytes"):
            budget.open("alice", 0, ())
        assert budget.used_bytes == 0

    run(scenario)


def test_segments_of_arenas_and_uploads_never_share_a_number() -> None:
    async def scenario() -> None:
        host = host_tier(PlainMemory())
        budget, namespace = UploadBudget(host, budget_bytes=64 * MIB), namespace_of(SMALL)
        first, _ = budget.open("alice", 1, ())
        await host.open_arenas(namespace, None)
        second, _ = budget.open("alice", 1, ())
        taken = [segment for arena in namespace.arenas() for segment, _, _ in arena.segments]
        assert len({first, second, *taken}) == 2 + len(taken)

    run(scenario)
