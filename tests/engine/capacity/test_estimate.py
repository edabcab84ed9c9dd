"""What is told ahead is what the engine then does."""

from __future__ import annotations

import pytest

from paramstore.config import Config
from paramstore.core.schema import STATE_DTYPES, Schema
from paramstore.engine.capacity.budget import split_budget, staging_bytes_of
from paramstore.engine.capacity.entitlements import GROWTH_ALIGNMENT_BYTES, SMALLEST_BYTES, entitled_bytes
from paramstore.engine.capacity.estimate import estimate

FIELDS = {"gate_up": (512, 256), "down": (256, 256)}
KEYS = 64


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_sizes_of_a_training_namespace_are_those_of_its_records(state_dtype: str) -> None:
    schema = Schema.adamw(FIELDS, state_dtype=state_dtype)
    config = Config(host_budget_bytes=256 << 20, retained_steps=3, held_steps=1)
    found = estimate(schema, KEYS, config, volume_count=2, core_count=4)
    assert found.parameter_elements == KEYS * 768 * 256
    assert found.state_bytes == KEYS * schema.record_bytes
    assert found.gradient_bytes == KEYS * schema.gradient_bytes
    entitled = entitled_bytes(schema, KEYS, config.retention) + 2 * schema.record_bytes
    assert 0 <= found.volume_bytes - 2 * SMALLEST_BYTES - entitled < 2 * GROWTH_ALIGNMENT_BYTES
    assert found.volume_bytes == 2 * found.volume_size_bytes
    assert found.split is not None
    assert found.split.staging_bytes == staging_bytes_of(schema, io_threads=16, piece_bytes=config.piece_bytes)
    assert found.split.working_slots <= KEYS


def test_fewer_bytes_a_parameter_leave_more_slots() -> None:
    config = Config(host_budget_bytes=80 << 20)
    slots = []
    for state_dtype in STATE_DTYPES:
        split = estimate(Schema.adamw(FIELDS, state_dtype=state_dtype), KEYS, config, volume_count=1, core_count=2).split
        assert split is not None
        slots.append(split.working_slots)
    assert slots == sorted(set(slots))


def test_the_least_budget_is_just_enough() -> None:
    schema = Schema.adamw(FIELDS)
    least = estimate(schema, KEYS, Config(), volume_count=1, core_count=2).least_host_bytes
    for budget, fits in ((least, True), (least - 1, False)):
        found = estimate(schema, KEYS, Config(host_budget_bytes=budget), volume_count=1, core_count=2)
        assert (found.split is not None) == fits


def test_update_workers_that_are_set_count_and_not_the_cores() -> None:
    schema, config = Schema.adamw(FIELDS), Config(host_budget_bytes=60 << 20, update_workers=1)
    found = estimate(schema, KEYS, config, volume_count=1, core_count=64)
    staging_bytes = staging_bytes_of(schema, io_threads=8, piece_bytes=config.piece_bytes)
    expected = split_budget(schema, key_count=KEYS, budget_bytes=60 << 20, pipeline_slots=5, staging_bytes=staging_bytes)
    assert found.split == expected


def test_inference_has_neither_gradients_nor_staging() -> None:
    schema = Schema.param({"w": ((512, 256), "bfloat16")})
    found = estimate(schema, KEYS, Config(), volume_count=1, core_count=2)
    assert found.gradient_bytes == 0
    assert found.bytes_per_parameter == 2
    assert found.split is not None
    assert (found.split.working_slots, found.split.staging_bytes) == (0, 0)


def test_an_exact_namespace_has_buffers_of_a_record_for_every_worker_and_two_more() -> None:
    config = Config(host_budget_bytes=256 << 20)
    schemas = (Schema.adamw(FIELDS, updates=updates) for updates in ("touched", "exact"))
    touched, exact = (estimate(schema, KEYS, config, volume_count=1, core_count=4) for schema in schemas)
    assert touched.split is not None
    assert exact.split is not None
    assert exact.split.staging_bytes - touched.split.staging_bytes == pytest.approx(6 * exact.record_bytes, abs=2 << 20)
