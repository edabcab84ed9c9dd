"""How the host budget is split: never above it, the pipeline first, no more than can be used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paramstore.core.schema import Schema
from paramstore.engine.capacity.budget import SLOTS_MIN, Split, least_bytes, split_budget
from paramstore.engine.tables.arena import segment_lengths
from paramstore_testkit.stores.small_host import (
    LARGE,
    MIB,
    OPAQUE,
    SMALL,
)

SCHEMAS = st.sampled_from([SMALL, LARGE, OPAQUE])


def used_bytes(split: Split, schema: Schema) -> int:
    param = sum(segment_lengths(split.param_slots, schema.part("param").image_bytes))
    working = sum(segment_lengths(split.working_slots, schema.record_bytes)) if schema.is_trainable else 0
    return split.staging_bytes + param + working


@given(
    schema=SCHEMAS, key_count=st.integers(1, 2000), budget_bytes=st.integers(0, 1 << 31), pipeline_slots=st.integers(2, 20),
    staging_bytes=st.integers(0, 4).map(lambda count: count * 2 * MIB),
)  # fmt: skip
def test_no_split_is_above_its_budget_or_below_what_works(
    schema: Schema, key_count: int, budget_bytes: int, pipeline_slots: int, staging_bytes: int
) -> None:
    split = split_budget(
        schema, key_count=key_count, budget_bytes=budget_bytes, pipeline_slots=pipeline_slots, staging_bytes=staging_bytes
    )
    if split is None:
        assert budget_bytes < least_bytes(schema, key_count, staging_bytes)
        return
    assert used_bytes(split, schema) <= budget_bytes
    least = min(key_count, SLOTS_MIN)
    assert least <= split.param_slots <= 2 * key_count
    if schema.is_trainable:
        assert least <= split.working_slots <= key_count


@given(schema=SCHEMAS, key_count=st.integers(1, 100))
def test_the_least_budget_is_enough_and_a_byte_less_is_not(schema: Schema, key_count: int) -> None:
    least = least_bytes(schema, key_count, 0)
    for budget_bytes, is_enough in ((least, True), (least - 1, False)):
        split = split_budget(schema, key_count=key_count, budget_bytes=budget_bytes, pipeline_slots=6, staging_bytes=0)
        assert (split is not None) is is_enough


def split_of(budget_mib: int, key_count: int = 64) -> Split:
    split = split_budget(LARGE, key_count=key_count, budget_bytes=budget_mib * MIB, pipeline_slots=6, staging_bytes=2 * MIB)
    assert split is not None
    return split


def test_a_training_budget_goes_to_the_pipeline_then_param_then_working_then_spare_param() -> None:
    assert split_of(12).working_slots < 6, "not even the pipeline: param has the least it needs"
    assert split_of(12).param_slots >= SLOTS_MIN
    pipeline = split_of(40)
    assert pipeline.working_slots == 6
    assert 6 < pipeline.param_slots < 64
    all_param = split_of(150)
    assert all_param.param_slots >= 64
    assert 6 < all_param.working_slots < 64
    everything = split_of(250)
    assert everything.working_slots == 64
    assert 64 < everything.param_slots < 128
    assert split_of(4000) == Split(param_slots=128, working_slots=64, staging_bytes=2 * MIB), "no more than can be used"


def test_a_param_schema_has_no_working_arena() -> None:
    split = split_budget(OPAQUE, key_count=8, budget_bytes=100 * MIB, pipeline_slots=6, staging_bytes=0)
    assert split == Split(9, 0, 0), "eight can be promised"
