"""How host memory is divided among a namespace's slots and buffers. Pure functions of sizes."""

from __future__ import annotations

from dataclasses import dataclass

from paramstore.config import SEGMENT_ALIGNMENT_BYTES
from paramstore.core.schema import CHUNK_BYTES, Schema
from paramstore.engine.planner.promises import slots_promising
from paramstore.engine.tables.arena import segment_lengths, slots_within
from paramstore.engine.transfers.routes import cut_pieces

CUT_BYTES_MAX = 1 << 30
"""A record larger than this is not cut into pieces to find the largest one: there would be thousands."""
SLOTS_MIN = 2
"""The fewest slots of each part: one in use and one that can change."""


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
    copies that readers of older steps see. An inference namespace gets as many as it takes to promise every key to one reader.
    """
    left = budget_bytes - staging_bytes
    param_bytes = schema.part("param").image_bytes
    least = min(key_count, SLOTS_MIN)
    if not schema.is_trainable:
        param = min(slots_promising(key_count), slots_within(left, param_bytes))
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
    total_bytes = io_threads * buffer_bytes(schema, piece_bytes) + advance_bytes
    return -(-total_bytes // SEGMENT_ALIGNMENT_BYTES) * SEGMENT_ALIGNMENT_BYTES


def buffer_bytes(schema: Schema, piece_bytes: int) -> int:
    """Size of one worker's staging buffer: the header's where master and `param` have the same bytes, else the largest piece's."""
    stored = schema.stored
    if schema.part("param").fields[0].dtype == stored.fields[0].dtype:
        return stored.header_bytes
    if stored.image_bytes > CUT_BYTES_MAX:
        return piece_bytes + CHUNK_BYTES + stored.header_bytes  # a piece ends where the first chunk behind its share begins
    return max(piece.end - piece.start for piece in cut_pieces(stored, piece_bytes, len(schema.specs)))
