"""How many bytes of the volumes a namespace is entitled to, and what size volumes need for that. Pure functions of sizes.

A namespace is entitled to its state once for every retained step, every older step that `held_steps` reserves for readers, every
snapshot and the step being made, plus the pipeline share, so that an apply can always be written beside all these. Other older
steps of readers are in room that nobody is entitled to, or go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paramstore.config import Retention
from paramstore.core.schema import Schema, round_up
from paramstore.storage.format.structures import Superblock, extents_start_bytes

DEFAULT_RETENTION = Retention()
PIPELINE_RECORDS_MIN = 4
PIPELINE_SHARE = 0.05
GROWTH_ALIGNMENT_BYTES = 1 << 20
SMALLEST_BYTES = round_up(extents_start_bytes(Superblock(bytes(16), bytes(16), 0)), GROWTH_ALIGNMENT_BYTES)
"""Size of a volume that has no room for a record yet: superblocks and note slots only."""


def entitled_bytes(schema: Schema, key_count: int, retention: Retention = DEFAULT_RETENTION, *, snapshots: int = 0) -> int:
    """Bytes that one namespace may take of all volumes together."""
    copies = kept_steps(retention, snapshots) if schema.is_trainable else 1
    return copies * key_count * schema.record_bytes + _pipeline_bytes(schema, key_count)


def _pipeline_bytes(schema: Schema, key_count: int) -> int:
    record_bytes = schema.record_bytes
    share_bytes = round_up(int(PIPELINE_SHARE * key_count * record_bytes), record_bytes)
    return max(PIPELINE_RECORDS_MIN * record_bytes, share_bytes)


def shares(schema: Schema, key_count: int, retention: Retention = DEFAULT_RETENTION, *, snapshots: int = 0) -> dict[str, float]:
    """What a namespace is entitled to, by what it is for, in multiples of its state: all parts of `entitled_bytes`."""
    pipeline = _pipeline_bytes(schema, key_count) / (key_count * schema.record_bytes)
    if not schema.is_trainable:
        return {"state": 1, "pipeline": pipeline}
    return {
        "retained_steps": retention.retained_steps, "growing": 1, "held_steps": retention.held_steps, "snapshots": snapshots,
        "pipeline": pipeline,
    }  # fmt: skip


def in_words(parts: Mapping[str, float]) -> str:
    """What `shares` says, for people."""
    meanings = {
        "retained_steps": "retained_steps", "growing": "the step being made", "held_steps": "held_steps", "snapshots": "snapshots",
        "state": "the records", "pipeline": "records written again",
    }  # fmt: skip
    named = (f"{count:.3g} for {meanings[name]}" for name, count in parts.items() if count)
    return f"{sum(parts.values()):.3g} times its state: {', '.join(named)}"


def kept_steps(retention: Retention, snapshots: int) -> int:
    """How many steps of a namespace are entitled to room at once, the one being made among them."""
    return retention.retained_steps + 1 + retention.held_steps + snapshots


def slack_bytes(schemas: Iterable[Schema], volume_count: int) -> int:
    """Bytes that namespaces may leave unused: one record of each on each volume, since no record straddles volumes."""
    return volume_count * sum(schema.record_bytes for schema in schemas)


def volume_size_bytes_of(schema: Schema, key_count: int, retention: Retention, volume_count: int) -> int:
    """The size that each of `volume_count` new volumes needs so that a namespace, alone on them, can be created."""
    needed = entitled_bytes(schema, key_count, retention) + slack_bytes([schema], volume_count)
    return SMALLEST_BYTES + round_up(-(-needed // volume_count), GROWTH_ALIGNMENT_BYTES)
