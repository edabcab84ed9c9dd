"""Says how much volume space and host memory a namespace will take, before there is one, by the engine's own rules."""

from __future__ import annotations

from dataclasses import dataclass

from paramstore.config import Config
from paramstore.core.schema import Schema
from paramstore.engine.capacity.budget import Split, least_bytes, split_budget, staging_bytes_of
from paramstore.engine.capacity.entitlements import shares, volume_size_bytes_of
from paramstore.engine.records.update import LOOKAHEAD_RECORDS
from paramstore.engine.transfers.advance import ADVANCE_LOOKAHEAD_RECORDS


@dataclass(frozen=True, slots=True)
class Estimate:
    """Sizes in bytes. record_bytes: one expert's state with header and padding. volume_size_bytes: the least size of each volume,
    with what it takes before its first record, the retained and the held steps, and what a commit and its successor need at once;
    volume_bytes: that of all volumes together. volume_shares: what the records' part of that is for, in multiples of `state_bytes`,
    named as the settings. gradient_bytes: all experts' gradients at once, the default of `gradient_budget`.
    least_host_bytes: the smallest host budget that works. split: how `host_budget_bytes` is used; None where it is too small."""

    key_count: int
    parameter_elements: int
    bytes_per_parameter: float
    record_bytes: int
    state_bytes: int
    param_bytes: int
    gradient_bytes: int
    volume_size_bytes: int
    volume_bytes: int
    volume_shares: dict[str, float]
    least_host_bytes: int
    host_budget_bytes: int
    split: Split | None


def estimate(schema: Schema, key_count: int, config: Config, *, volume_count: int, core_count: int) -> Estimate:
    """Estimates a namespace that is alone on a daemon with these settings. config: `update_workers` 0 means `core_count`."""
    update_workers = config.update_workers or core_count
    staging_bytes = staging_bytes_of(
        schema, io_threads=config.io_workers * volume_count, piece_bytes=config.piece_bytes,
        advance_buffers=update_workers + ADVANCE_LOOKAHEAD_RECORDS,
    )  # fmt: skip
    split = split_budget(
        schema, key_count=key_count, budget_bytes=config.host_budget_bytes, staging_bytes=staging_bytes,
        pipeline_slots=update_workers + LOOKAHEAD_RECORDS,
    )  # fmt: skip
    volume_size_bytes = volume_size_bytes_of(schema, key_count, config.retention, volume_count)
    return Estimate(
        key_count=key_count,
        parameter_elements=key_count * schema.parameter_elements,
        bytes_per_parameter=schema.bytes_per_parameter,
        record_bytes=schema.record_bytes,
        state_bytes=key_count * schema.record_bytes,
        param_bytes=key_count * schema.part("param").image_bytes,
        gradient_bytes=key_count * schema.gradient_bytes if schema.is_trainable else 0,
        volume_size_bytes=volume_size_bytes,
        volume_bytes=volume_count * volume_size_bytes,
        volume_shares=shares(schema, key_count, config.retention),
        least_host_bytes=least_bytes(schema, key_count, staging_bytes),
        host_budget_bytes=config.host_budget_bytes,
        split=split,
    )
