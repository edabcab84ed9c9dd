"""The host tier: which arena gets how much of the budget, segments and their clients, upload areas, the kernel's figures.

The budget is exact: a segment's whole length counts from before it is allocated until it is closed, which happens only after every
client that was given it has acknowledged its unmapping. Upload areas have a budget of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from paramstore.config import SEGMENT_ALIGNMENT_BYTES, format_size
from paramstore.core.schema import CHUNK_BYTES, Schema
from paramstore.engine.planner.arenas import add_segment, close_arenas, next_segment, open_arenas, plan_segment, stop_growing
from paramstore.engine.tables.arena import Arena, SegmentMemory, segment_lengths, slots_within
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.transfers.buffers import Buffers
from paramstore.engine.transfers.routes import cut_pieces
from paramstore.engine.transfers.runner import BACKGROUND_LANE, Runner
from paramstore.errors import CapacityError
from paramstore.policy.base import Policy

logger = logging.getLogger(__name__)

CUT_BYTES_MAX = 1 << 30
"""A record larger than this is not cut into pieces to find the largest one: there would be thousands."""
SLOTS_MIN = 2
"""The fewest slots of each part: one in use and one that can change."""

UNMAP_PAUSE_S = 0.002


class Memory(Protocol):
    """Makes segments; `paramstore.daemon.assembly` gives the real ones, tests plain memory."""

    def shared(self, length_bytes: int) -> SegmentMemory: ...

    def private(self, length_bytes: int) -> SegmentMemory: ...

    def upload(self, length_bytes: int) -> SegmentMemory: ...

    def describe(self) -> dict[str, object]:
        """Returns page kinds, and the command that would give better ones."""
        ...


@dataclass(frozen=True, slots=True)
class Split:
    """Slots of one namespace's arenas and the bytes of its staging buffers."""

    param_slots: int
    working_slots: int
    staging_bytes: int


def split_budget(
    schema: Schema, *, key_count: int, budget_bytes: int, pipeline_slots: int, staging_bytes: int
) -> Split | None:
    """Splits `budget_bytes` between a namespace's parts; None if that cannot hold the least that works.

    A training namespace gets, in this order: the working slots that the update pipeline needs; `param` slots for all the writer can
    use (each byte held saves about 4 bytes of I/O a step); slots for all working copies (about 2 bytes); last, slots for `param`
    copies that readers of older steps see.
    """
    left = budget_bytes - staging_bytes
    param_bytes = schema.part("param").image_bytes
    least = min(key_count, SLOTS_MIN)
    if not schema.is_trainable:
        param = min(key_count, slots_within(left, param_bytes))
        return Split(param, 0, staging_bytes) if param >= least else None
    working_bytes = schema.record_bytes
    least_param_bytes = sum(segment_lengths(least, param_bytes))
    working = min(key_count, pipeline_slots, slots_within(left - least_param_bytes, working_bytes))
    param = min(key_count, slots_within(left - _used(working, working_bytes), param_bytes))
    if working < least or param < least:
        return None
    working = min(key_count, slots_within(left - _used(param, param_bytes), working_bytes))
    param = min(2 * key_count, slots_within(left - _used(working, working_bytes), param_bytes))
    return Split(param, working, staging_bytes)


def _used(slots: int, slot_bytes: int) -> int:
    return sum(segment_lengths(slots, slot_bytes))


def least_bytes(schema: Schema, key_count: int, staging_bytes: int) -> int:
    """The smallest budget that `split_budget` accepts."""
    least = min(key_count, SLOTS_MIN)
    working = _used(least, schema.record_bytes) if schema.is_trainable else 0
    return staging_bytes + working + _used(least, schema.part("param").image_bytes)


def staging_bytes_of(schema: Schema, *, io_threads: int, piece_bytes: int, advance_buffers: int = 0) -> int:
    """Memory beside a namespace's arenas: a staging buffer for each worker thread of all volumes, and advance buffers."""
    if not schema.is_trainable:
        return 0
    advance_bytes = advance_buffers * schema.record_bytes if schema.updates == "exact" else 0
    total_bytes = io_threads * _buffer_bytes(schema, piece_bytes) + advance_bytes
    return -(-total_bytes // SEGMENT_ALIGNMENT_BYTES) * SEGMENT_ALIGNMENT_BYTES


def _buffer_bytes(schema: Schema, piece_bytes: int) -> int:
    """Size of one worker's staging buffer: the header's where master and `param` have the same bytes, else the largest piece's."""
    stored = schema.stored
    if schema.part("param").fields[0].dtype == stored.fields[0].dtype:
        return stored.header_bytes
    if stored.image_bytes > CUT_BYTES_MAX:
        return piece_bytes + CHUNK_BYTES + stored.header_bytes  # a piece ends where the first chunk behind its share begins
    return max(piece.end - piece.start for piece in cut_pieces(stored, piece_bytes, len(schema.specs)))


@dataclass(slots=True)
class _Segment:
    memory: SegmentMemory
    namespace: str
    is_shared: bool
    clients: set[object] = field(default_factory=set)
    is_given_up: bool = False


class HostTier:
    """Allocates host memory; owns every segment and both budgets."""

    def __init__(
        self, runner: Runner, memory: Memory, buffers: Buffers, *, budget_bytes: int, io_threads: int, piece_bytes: int,
        pipeline_slots: int, make_policy: Callable[[int], Policy], dirty_limit_bytes: int | None = None, advance_buffers: int = 2,
    ) -> None:  # fmt: skip
        """buffers: takes the memory beside the arenas. dirty_limit_bytes: of every namespace's working arena. advance_buffers:
        record-sized buffers of each exact namespace."""
        self.budget_bytes = budget_bytes
        self.memory = memory
        self._runner = runner
        self._buffers = buffers
        self._io_threads = io_threads
        self._piece_bytes = piece_bytes
        self._pipeline_slots = pipeline_slots
        self._make_policy = make_policy
        self._dirty_limit_bytes = dirty_limit_bytes
        self._advance_buffers = advance_buffers
        self._segments: dict[int, _Segment] = {}
        self._next_segment = 1
        self._upload_bytes: dict[object, int] = {}
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
        if namespace.param_arena is not None:
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
            slot_bytes=param_part.image_bytes, planned_slots=split.param_slots, policy=self._make_policy(split.param_slots)
        )
        working = param
        if schema.is_trainable:
            working = Arena(
                slot_bytes=schema.record_bytes, planned_slots=split.working_slots, policy=self._make_policy(split.working_slots),
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
        if arena not in (namespace.param_arena, namespace.working_arena):
            return False
        add_segment(arena, segment_id, memory, slots=slots)
        return True

    def _new_segment(self, namespace: NamespaceState, length_bytes: int, *, is_shared: bool) -> tuple[int, SegmentMemory]:
        assert self.used_bytes + length_bytes <= self.budget_bytes
        memory = self.memory.shared(length_bytes) if is_shared else self.memory.private(length_bytes)
        segment_id = self._next_segment
        self._next_segment += 1
        self._segments[segment_id] = _Segment(memory, namespace.name, is_shared)
        return segment_id, memory

    async def _lend_buffers(self, namespace: NamespaceState, staging_bytes: int) -> None:
        _, memory = self._new_segment(namespace, staging_bytes, is_shared=False)
        await self._runner.call(BACKGROUND_LANE, memory.touch)
        each = _buffer_bytes(namespace.schema, self._piece_bytes)
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
                for client in segment.clients:
                    to_unmap.setdefault(client, []).append(segment_id)
                self._close_if_unmapped(segment_id)
        return to_unmap

    # --- clients

    def give(self, client: object, segment_ids: Iterable[int]) -> list[tuple[int, int, int]]:
        """Records that `client` gets these segments; returns (id, length, fd) of those it had not yet."""
        given = []
        for segment_id in segment_ids:
            segment = self._segments[segment_id]
            if client not in segment.clients:
                assert segment.memory.fd is not None
                segment.clients.add(client)
                given.append((segment_id, segment.memory.length_bytes, segment.memory.fd))
        return given

    def unmapped(self, client: object, segment_ids: Iterable[int] | None = None) -> None:
        """Records that `client` has unmapped these segments; None: it is gone, and with it all its mappings. Its upload areas count
        until `drop_uploads`: an apply may still read there."""
        for segment_id in list(self._segments) if segment_ids is None else list(segment_ids):
            segment = self._segments.get(segment_id)
            if segment is not None:
                segment.clients.discard(client)
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
        if segment.is_given_up and not segment.clients:
            segment.memory.close()
            del self._segments[segment_id]

    # --- upload areas

    def open_upload(self, client: object, length_bytes: int, *, limit_bytes: int) -> tuple[int, SegmentMemory]:
        """Makes an upload segment for `client`. Raises CapacityError naming the size needed; nothing is taken then."""
        rounded = -(-length_bytes // SEGMENT_ALIGNMENT_BYTES) * SEGMENT_ALIGNMENT_BYTES
        used = sum(self._upload_bytes.values())
        if used + rounded > limit_bytes:
            raise CapacityError(
                f"upload areas would need {format_size(used + rounded)}, gradient_budget allows {format_size(limit_bytes)} on this "
                f"node: raise it to {used + rounded} bytes, or apply before pushing more"
            )
        memory = self.memory.upload(rounded)
        segment_id = self._next_segment
        self._next_segment += 1
        self._upload_bytes[client] = self._upload_bytes.get(client, 0) + rounded
        return segment_id, memory

    def drop_uploads(self, client: object) -> None:
        """Frees the budget that the client's upload segments took; they are closed."""
        self._upload_bytes.pop(client, None)

    def upload_bytes_of(self, client: object) -> int:
        return self._upload_bytes.get(client, 0)

    @property
    def upload_bytes(self) -> int:
        return sum(self._upload_bytes.values())

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
            "kernel_peak_bytes": self._kernel_peak_bytes, "upload_bytes": self.upload_bytes,
            "segments": len(self._segments), **self.memory.describe(),
        }  # fmt: skip
