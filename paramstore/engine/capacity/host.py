"""The host tier: arenas and their segments, which clients have mapped these, the kernel's figures.

The budget is exact: a segment's whole length counts from before it is allocated until it is closed, which happens only after every
client that was given it has acknowledged its unmapping. Upload areas have a budget of their own (`upload_budget`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from paramstore.core.schema import Schema
from paramstore.engine.capacity.budget import Split, buffer_bytes, least_bytes, split_budget, staging_bytes_of
from paramstore.engine.planner.arenas import add_segment, close_arenas, next_segment, open_arenas, plan_segment, stop_growing, warm
from paramstore.engine.tables.arena import Arena, SegmentMemory, segment_lengths
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.transfers.buffers import Buffers
from paramstore.engine.transfers.runner import BACKGROUND_LANE, Runner, in_slices
from paramstore.errors import CapacityError
from paramstore.policy.base import CountingPolicy
from paramstore.sizes import format_size

logger = logging.getLogger(__name__)

UNMAP_PAUSE_S = 0.002


class Memory(Protocol):
    """Makes segments; `paramstore.daemon.assembly` gives the real ones, tests plain memory."""

    def shared(self, length_bytes: int) -> SegmentMemory: ...

    def private(self, length_bytes: int) -> SegmentMemory: ...

    def upload(self, length_bytes: int) -> SegmentMemory: ...

    def describe(self) -> dict[str, object]:
        """Returns page kinds, and the command that would give better ones."""
        ...


@dataclass(slots=True)
class _Segment:
    memory: SegmentMemory
    namespace: str
    is_shared: bool
    is_given_up: bool = False


class HostTier:
    """Allocates host memory; owns every segment and both budgets."""

    def __init__(
        self, runner: Runner, memory: Memory, buffers: Buffers, *, budget_bytes: int, io_threads: int, piece_bytes: int,
        pipeline_slots: int, make_policy: Callable[[int], CountingPolicy], dirty_limit_bytes: int | None = None,
        advance_buffers: int = 2,
    ) -> None:  # fmt: skip
        """buffers: takes the memory beside the arenas. dirty_limit_bytes: of every namespace's working arena. advance_buffers:
        record-sized buffers of each exact namespace."""
        self.budget_bytes = budget_bytes
        self.memory = memory
        self._runner = runner
        self._buffers = buffers
        self._segment_ids = count(1)
        self._io_threads = io_threads
        self._piece_bytes = piece_bytes
        self._pipeline_slots = pipeline_slots
        self._make_policy = make_policy
        self._dirty_limit_bytes = dirty_limit_bytes
        self._advance_buffers = advance_buffers
        self._segments: dict[int, _Segment] = {}
        self._mapped: dict[object, set[int]] = {}
        self._kernel_peak_bytes = 0

    # --- arenas

    @property
    def used_bytes(self) -> int:
        return sum(segment.memory.length_bytes for segment in self._segments.values())

    def check_least(self, name: str, schema: Schema, key_count: int, host_bytes: int | None) -> None:
        """Raises CapacityError where even the whole budget is too small, before anything is taken for the namespace."""
        limit_bytes = self.budget_bytes if host_bytes is None else min(self.budget_bytes, host_bytes)
        least = least_bytes(schema, key_count, self._staging_bytes(schema))
        if least > limit_bytes:
            raise CapacityError(
                f"namespace {name!r} needs at least {format_size(least)} of host memory (records of "
                f"{format_size(schema.record_bytes)}); it may have {format_size(limit_bytes)}: raise host_budget or host_bytes"
            )

    async def open_arenas(self, namespace: NamespaceState, host_bytes: int | None) -> None:
        """Gives `namespace` its arenas, of all that is left of the budget or of `host_bytes` of it. Slots become available as their
        pages are touched; the first segment of each arena is there on return. Raises CapacityError, and nothing is taken."""
        if namespace.has_memory:
            return
        schema, key_count = namespace.schema, len(namespace.keys)
        staging_bytes = self._staging_bytes(schema)
        left = self.budget_bytes - self.used_bytes
        granted = left if host_bytes is None else min(left, host_bytes)
        split = split_budget(
            schema, key_count=key_count, budget_bytes=granted, pipeline_slots=self._pipeline_slots, staging_bytes=staging_bytes
        )
        if split is None:
            raise CapacityError(
                f"namespace {namespace.name!r} needs at least {format_size(least_bytes(schema, key_count, staging_bytes))} of host "
                f"memory (records of {format_size(schema.record_bytes)}); {format_size(max(0, granted))} are left of "
                f"host_budget {format_size(self.budget_bytes)}: raise host_budget, or close other namespaces"
            )
        try:
            await self._allocate(namespace, split)
        except BaseException:
            self.close_arenas(namespace)
            raise

    def _staging_bytes(self, schema: Schema) -> int:
        return staging_bytes_of(
            schema, io_threads=self._io_threads, piece_bytes=self._piece_bytes, advance_buffers=self._advance_buffers
        )

    async def _allocate(self, namespace: NamespaceState, split: Split) -> None:
        schema = namespace.schema
        param_part = schema.part("param")
        param = Arena(
            slot_bytes=param_part.image_bytes, planned_slots=split.param_slots,
            policy=await self._warm_policy(namespace, "param", split.param_slots),
        )  # fmt: skip
        working = param
        if schema.is_trainable:
            working = Arena(
                slot_bytes=schema.record_bytes, planned_slots=split.working_slots,
                policy=await self._warm_policy(namespace, schema.stored.name, split.working_slots),
                dirty_limit_bytes=self._dirty_limit_bytes,
            )  # fmt: skip
        open_arenas(namespace, param, working)
        if split.staging_bytes:
            await self._lend_buffers(namespace, split.staging_bytes)
        if working is not param:
            self._plan_segments(namespace, working, split.working_slots, is_shared=False)
        self._plan_segments(namespace, param, split.param_slots, is_shared=True)
        for arena in (param, working):
            if not arena.slots.count:
                await self.grow(namespace, arena)

    async def _warm_policy(self, namespace: NamespaceState, part: str, slots: int) -> CountingPolicy:
        """Makes the policy of an arena, which goes on from what the one before it had counted."""
        policy = self._make_policy(slots)
        await in_slices(warm(policy, namespace, part))
        return policy

    def _plan_segments(self, namespace: NamespaceState, arena: Arena, slot_count: int, *, is_shared: bool) -> None:
        """Maps the arena's segments, so that their bytes are taken from the budget; no page is touched yet."""
        for length_bytes in segment_lengths(slot_count, arena.slot_bytes):
            segment_id, memory = self._new_segment(namespace, length_bytes, is_shared=is_shared)
            slots = min(slot_count, length_bytes // arena.slot_bytes)
            plan_segment(arena, segment_id, memory, slots=slots)
            slot_count -= slots

    async def stop_growing(self, namespace: NamespaceState) -> None:
        """Stops adding segments: on return no page of the namespace's memory is being touched, and none will be."""
        for arena in namespace.arenas():
            stop_growing(arena)
        await self._runner.behind(BACKGROUND_LANE)  # its thread may touch one now

    async def grow(self, namespace: NamespaceState, arena: Arena) -> bool:
        """Touches the arena's next segment and adds its slots; False if there is none, or the arena was given up.

        Where the machine has no memory for it the arena stays as it is; raises CapacityError if it has no slot at all.
        """
        planned = next_segment(arena)
        if planned is None:
            return False
        segment_id, memory, slots = planned
        try:
            await self._runner.call(BACKGROUND_LANE, memory.touch)
        except CapacityError as error:
            if not arena.slots.count:
                raise
            counts = arena.slots.count, arena.planned_slots
            logger.warning("namespace %r: an arena has %d of %d planned slots: %s", namespace.name, *counts, error)
            stop_growing(arena, is_final=True)
            return False
        if arena not in namespace.arenas():
            return False
        add_segment(arena, segment_id, memory, slots=slots)
        return True

    def _new_segment(self, namespace: NamespaceState, length_bytes: int, *, is_shared: bool) -> tuple[int, SegmentMemory]:
        assert self.used_bytes + length_bytes <= self.budget_bytes
        memory = self.memory.shared(length_bytes) if is_shared else self.memory.private(length_bytes)
        segment_id = self.next_segment_id()
        self._segments[segment_id] = _Segment(memory, namespace.name, is_shared)
        return segment_id, memory

    def next_segment_id(self) -> int:
        """Numbers a segment, among all of the daemon."""
        return next(self._segment_ids)

    async def _lend_buffers(self, namespace: NamespaceState, staging_bytes: int) -> None:
        _, memory = self._new_segment(namespace, staging_bytes, is_shared=False)
        await self._runner.call(BACKGROUND_LANE, memory.touch)
        each = buffer_bytes(namespace.schema, self._piece_bytes)
        lent = self._buffers.lend(namespace.name)
        for index in range(self._io_threads):
            lent.staging.add(memory.view(index * each, each))
        if namespace.is_exact:
            start, record_bytes = self._io_threads * each, namespace.schema.record_bytes
            lent.advance.extend(memory.view(start + index * record_bytes, record_bytes) for index in range(self._advance_buffers))

    def close_arenas(self, namespace: NamespaceState) -> dict[object, list[int]]:
        """Gives up a namespace's memory, of which nothing may be in use. Returns the clients that mapped a segment, with the ids
        that they must unmap; the segments' bytes come back to the budget when they have."""
        close_arenas(namespace)
        self._buffers.take_back(namespace.name)
        to_unmap: dict[object, list[int]] = {}
        for segment_id, segment in list(self._segments.items()):
            if segment.namespace == namespace.name:
                segment.is_given_up = True
                for client, mapped in self._mapped.items():
                    if segment_id in mapped:
                        to_unmap.setdefault(client, []).append(segment_id)
                self._close_if_unmapped(segment_id)
        return to_unmap

    # --- clients

    def mapped_by(self, client: object) -> Set[int]:
        """The ids of the segments that `client` was given and has not unmapped: a live view, which lasts until it is gone."""
        return self._mapped.setdefault(client, set())

    def give(self, client: object, segment_ids: Iterable[int]) -> list[tuple[int, int, int]]:
        """Records that `client` gets these segments; returns (id, length, fd) of those it had not yet."""
        mapped = self._mapped.setdefault(client, set())
        given = []
        for segment_id in segment_ids:
            if segment_id not in mapped:
                memory = self._segments[segment_id].memory
                assert memory.fd is not None
                mapped.add(segment_id)
                given.append((segment_id, memory.length_bytes, memory.fd))
        return given

    def unmapped(self, client: object, segment_ids: Iterable[int] | None = None) -> None:
        """Records that `client` has unmapped these segments; None: it is gone, and with it all its mappings."""
        mapped = self._mapped.get(client, set())
        left = list(mapped) if segment_ids is None else list(mapped.intersection(segment_ids))
        mapped.difference_update(left)
        if segment_ids is None:
            self._mapped.pop(client, None)
        for segment_id in left:
            self._close_if_unmapped(segment_id)

    async def until_unmapped(self, timeout_s: float) -> None:
        """Waits until clients have unmapped all segments that were given up, at most `timeout_s`."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while any(segment.is_given_up for segment in self._segments.values()):
            if asyncio.get_running_loop().time() > deadline_s:
                return
            await asyncio.sleep(UNMAP_PAUSE_S)

    def _close_if_unmapped(self, segment_id: int) -> None:
        segment = self._segments[segment_id]
        if segment.is_given_up and not any(segment_id in mapped for mapped in self._mapped.values()):
            segment.memory.close()
            del self._segments[segment_id]

    # --- figures

    async def kernel_bytes(self) -> int:
        """Bytes of all arenas' and staging buffers' pages by the kernel's count. Counting looks at every page, so it runs in the
        background; the peak is kept."""
        memories = [segment.memory for segment in self._segments.values()]
        now: int = await self._runner.call(BACKGROUND_LANE, lambda: sum(memory.resident_bytes() for memory in memories))
        self._kernel_peak_bytes = max(self._kernel_peak_bytes, now)
        return now

    async def stats(self) -> dict[str, object]:
        kernel_bytes = await self.kernel_bytes()
        private = sum(segment.memory.length_bytes for segment in self._segments.values() if not segment.is_shared)
        return {
            "budget_bytes": self.budget_bytes, "used_bytes": self.used_bytes, "private_bytes": private,
            "shared_bytes": self.used_bytes - private, "kernel_bytes": kernel_bytes,
            "kernel_peak_bytes": self._kernel_peak_bytes,
            "segments": len(self._segments), **self.memory.describe(),
        }  # fmt: skip
