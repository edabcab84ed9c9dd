"""The host budget: who gets how much of it, exact to the byte, until the last client has unmapped what it was given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from paramstore.core.schema import Schema
from paramstore.engine.capacity import budget
from paramstore.engine.capacity.budget import staging_bytes_of
from paramstore.engine.tables.arena import Arena
from paramstore.errors import CapacityError
from paramstore_testkit.disks.machine import PlainMemory, PlainSegment
from paramstore_testkit.stores.small_host import (
    LARGE,
    MIB,
    OPAQUE,
    SMALL,
    CountingMemory,
    grow_all,
    host_tier,
    namespace_of,
)

# --- arenas


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


@pytest.mark.parametrize("schema", [SMALL, LARGE, OPAQUE])
def test_what_is_used_is_exactly_what_is_mapped_and_never_above_the_budget(schema: Schema) -> None:
    async def scenario() -> None:
        memory = CountingMemory()
        host = host_tier(memory)
        namespace = namespace_of(schema, experts=99)
        await host.open_arenas(namespace, None)
        await grow_all(host, namespace)
        assert host.used_bytes == sum(segment.length_bytes for segment in memory.open) <= host.budget_bytes
        assert namespace.memory.param.slots.count == namespace.memory.param.planned_slots
        assert (namespace.memory.working is namespace.memory.param) is (not schema.is_trainable)

    run(scenario)


def test_a_namespace_takes_no_more_than_it_was_given() -> None:
    async def scenario() -> None:
        host = host_tier(PlainMemory())
        first, second = namespace_of(LARGE, "first", 64), namespace_of(LARGE, "second", 64)
        await host.open_arenas(first, 20 * MIB)
        assert host.used_bytes <= 20 * MIB
        used = host.used_bytes
        await host.open_arenas(first, 60 * MIB)
        assert host.used_bytes == used, "it has its arenas: nothing happens"
        await host.open_arenas(second, None)
        assert used < host.used_bytes <= 64 * MIB

    run(scenario)


def test_what_does_not_fit_is_refused_with_the_size_needed_and_nothing_is_taken() -> None:
    async def scenario() -> None:
        memory = CountingMemory()
        host = host_tier(memory, budget_bytes=6 * MIB)
        namespace = namespace_of(LARGE)
        with pytest.raises(CapacityError, match=r"needs at least 1\d MiB of host memory \(records of 3\.\d+ MiB\); 6 MiB are left"):
            await host.open_arenas(namespace, None)
        assert host.used_bytes == 0
        assert memory.open == []
        assert not namespace.has_memory

    run(scenario)


@pytest.mark.parametrize("touches", [0, 1, 2])
def test_a_machine_that_runs_out_while_pages_are_touched_gets_everything_back(touches: int) -> None:
    async def scenario() -> None:
        memory = CountingMemory()
        memory.touches_left = touches
        host = host_tier(memory)
        namespace = namespace_of(LARGE)
        with pytest.raises(CapacityError, match="no more memory"):
            await host.open_arenas(namespace, None)
        assert host.used_bytes == 0
        assert memory.open == []
        assert not namespace.has_memory
        with pytest.raises(KeyError):
            host._buffers.of(namespace.name)
        memory.touches_left = 99
        await host.open_arenas(namespace, None)

    run(scenario)


def test_slots_come_up_segment_by_segment_and_the_first_of_each_arena_at_once() -> None:
    async def scenario() -> None:
        host = host_tier(PlainMemory(), budget_bytes=1 << 34)
        namespace = namespace_of(SMALL)
        await host.open_arenas(namespace, None)
        arena: Arena = namespace.memory.param
        assert arena.slots.count > 0
        arena.planned_segments.append((77, PlainSegment(2 * MIB), 3))
        count = arena.slots.count
        assert await host.grow(namespace, arena)
        assert arena.slots.count == count + 3
        assert not await host.grow(namespace, arena)
        arena.planned_segments.append((78, PlainSegment(2 * MIB), 3))
        host.close_arenas(namespace)
        assert not await host.grow(namespace, arena), "it was given up meanwhile"
        assert arena.slots.count == count + 3

    run(scenario)


def test_slots_that_the_machine_has_no_memory_for_are_promised_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramstore.engine.tables.arena.SEGMENT_BYTES", 2 * MIB)

    async def scenario() -> None:
        memory = CountingMemory()
        host = host_tier(memory)
        namespace = namespace_of(LARGE)
        await host.open_arenas(namespace, None)
        arena: Arena = namespace.memory.working
        assert 0 < arena.slots.count < arena.planned_slots
        assert await host.grow(namespace, arena)
        memory.touches_left = 0
        assert not await host.grow(namespace, arena)
        assert arena.planned_slots == arena.slots.count
        assert not await host.grow(namespace, arena)

    run(scenario)


def test_nothing_grows_any_more_once_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramstore.engine.tables.arena.SEGMENT_BYTES", 2 * MIB)

    async def scenario() -> None:
        memory = CountingMemory()
        host = host_tier(memory)
        namespace = namespace_of(LARGE)
        await host.open_arenas(namespace, None)
        growing = asyncio.ensure_future(host.grow(namespace, namespace.memory.working))
        await asyncio.sleep(0)
        touches = memory.touches_left
        await host.stop_growing(namespace)
        assert memory.touches_left == touches - 1, "the one under way is over"
        await growing
        await grow_all(host, namespace)
        assert memory.touches_left == touches - 1

    run(scenario)


def test_unmapping_is_waited_for_no_longer_than_one_says() -> None:
    async def scenario() -> None:
        host = host_tier(CountingMemory())
        namespace = namespace_of(SMALL)
        await host.until_unmapped(5.0)  # nothing was given up: at once
        await host.open_arenas(namespace, None)
        ((segment, _, _),) = namespace.memory.param.segments
        host.give("alice", [segment])
        await host.until_unmapped(5.0)
        host.close_arenas(namespace)
        await host.until_unmapped(0.0)
        assert host.used_bytes > 0
        asyncio.get_running_loop().call_later(0.01, host.unmapped, "alice", [segment])
        await host.until_unmapped(5.0)
        assert host.used_bytes == 0

    run(scenario)


def test_a_namespace_that_not_even_the_whole_budget_holds_is_refused_before_anything_is_done() -> None:
    async def scenario() -> None:
        host = host_tier(PlainMemory(), budget_bytes=14 * MIB)
        host.check_least("moe", LARGE, 8, None)
        with pytest.raises(CapacityError, match=r"namespace 'moe' needs at least 14 MiB .*; it may have 13 MiB: raise host_budget"):
            host.check_least("moe", LARGE, 8, 13 * MIB)
        await host.open_arenas(namespace_of(LARGE), 14 * MIB)  # what it names is enough

    run(scenario)


@pytest.mark.parametrize("fields", [{"w": (1 << 25,)}, {"w": (3_000_001,), "v": (5,)}, {"w": (5,), "v": (1_999_999,)}])
@pytest.mark.parametrize("piece_bytes", [MIB, 3 * MIB, 16 * MIB])
def test_a_buffer_for_a_record_that_is_not_cut_holds_its_largest_piece(
    fields: dict[str, tuple[int, ...]], piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = Schema.adamw(fields)
    exact = staging_bytes_of(schema, io_threads=64, piece_bytes=piece_bytes)
    monkeypatch.setattr(budget, "CUT_BYTES_MAX", 0)
    assert exact <= staging_bytes_of(schema, io_threads=64, piece_bytes=piece_bytes)


@pytest.mark.parametrize(("schema", "buffer_bytes"), [(SMALL, 4096), (LARGE, MIB + 4096), (OPAQUE, 0)])
def test_staging_has_a_buffer_for_every_worker_where_reads_end_in_another_layout(schema: Schema, buffer_bytes: int) -> None:
    async def scenario() -> None:
        host = host_tier(PlainMemory(), io_threads=3)
        namespace = namespace_of(schema)
        await host.open_arenas(namespace, None)
        if not buffer_bytes:
            with pytest.raises(KeyError):
                host._buffers.of(namespace.name)
            return
        staging = host._buffers.of(namespace.name).staging
        buffers = [staging.borrow() for _ in range(3)]
        assert {len(buffer) for buffer in buffers} == {buffer_bytes}
        with pytest.raises(IndexError):
            staging.borrow()

    run(scenario)


# --- clients


def test_a_client_is_given_a_segment_once() -> None:
    async def scenario() -> None:
        host = host_tier(CountingMemory())
        namespace = namespace_of(SMALL)
        await host.open_arenas(namespace, None)
        ((segment, memory, _),) = namespace.memory.param.segments
        assert host.give("alice", [segment]) == [(segment, memory.length_bytes, 99)]
        assert host.give("alice", [segment]) == []
        assert host.give("bob", [segment]) != []

    run(scenario)


def test_a_segment_counts_until_every_client_has_unmapped_it() -> None:
    async def scenario() -> None:
        memory = CountingMemory()
        host = host_tier(memory)
        namespace = namespace_of(SMALL)
        await host.open_arenas(namespace, None)
        ((segment, shared, _),) = namespace.memory.param.segments
        host.give("alice", [segment])
        host.give("bob", [segment])
        assert host.close_arenas(namespace) == {"alice": [segment], "bob": [segment]}
        assert not namespace.has_memory
        assert host.used_bytes == shared.length_bytes, "the private ones went at once"
        host.unmapped("alice", [segment])
        host.unmapped("alice", [segment])
        host.unmapped("stranger", [segment, 12345])
        assert host.used_bytes == shared.length_bytes
        host.unmapped("bob")
        assert host.used_bytes == 0
        assert memory.open == []

    run(scenario)


def test_a_client_that_unmaps_a_segment_in_use_frees_nothing() -> None:
    async def scenario() -> None:
        host = host_tier(CountingMemory())
        namespace = namespace_of(SMALL)
        await host.open_arenas(namespace, None)
        ((segment, _, _),) = namespace.memory.param.segments
        used = host.used_bytes
        host.give("alice", [segment])
        host.unmapped("alice", [segment])
        assert host.used_bytes == used
        assert host.give("alice", [segment]) != [], "it may map it again"

    run(scenario)


def test_memory_that_no_client_maps_is_free_at_once() -> None:
    async def scenario() -> None:
        host = host_tier(CountingMemory())
        first, second = namespace_of(LARGE, "first"), namespace_of(LARGE, "second")
        await host.open_arenas(first, 20 * MIB)
        used = host.used_bytes
        await host.open_arenas(second, None)
        assert host.close_arenas(first) == {}
        assert host.used_bytes > 0
        host.close_arenas(second)
        assert host.used_bytes == 0 < used

    run(scenario)


# --- figures


def test_the_figures_are_those_of_the_kernel_and_keep_their_peak() -> None:
    async def scenario() -> None:
        host = host_tier(PlainMemory())
        namespace = namespace_of(SMALL)
        await host.open_arenas(namespace, None)
        stats = await host.stats()
        used = host.used_bytes
        assert stats["kernel_bytes"] == stats["kernel_peak_bytes"] == stats["used_bytes"] == used
        assert (stats["shared_bytes"], stats["private_bytes"]) == (2 * MIB, used - 2 * MIB)
        assert stats["segments"] == 3
        assert stats["page_advice"] == ""
        host.close_arenas(namespace)
        stats = await host.stats()
        assert (stats["kernel_bytes"], stats["kernel_peak_bytes"], stats["used_bytes"]) == (0, used, 0)

    run(scenario)
