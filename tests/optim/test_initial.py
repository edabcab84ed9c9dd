"""A record's first state."""

from __future__ import annotations

import pytest
import torch

from paramstore.core.optimizers import OPTIMIZERS
from paramstore.core.schema import STATE_DTYPES, Schema
from paramstore.optim.initial import fill_initial
from paramstore_testkit.oracles.optim_records import buffer, filled_record

SHAPES = {"gate_up": (7, 13), "down": (1041,), "one": (1,)}


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_initial_value_becomes_master_with_states_of_zero(kind: str, state_dtype: str) -> None:
    schema = Schema.trained(kind, SHAPES, state_dtype=state_dtype)
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    image = filled_record(schema, values)
    expected = bytearray(schema.record_bytes)
    expected[: schema.stored.header_bytes] = b"\xa5" * schema.stored.header_bytes
    for name, value in values.items():
        field = schema.stored.field(f"master/{name}")
        expected[field.offset_bytes : field.offset_bytes + field.length_bytes] = value.numpy().tobytes()
    assert image == expected


def test_an_initial_value_of_a_param_schema_is_taken_as_it_is() -> None:
    schema = Schema.param({"w": ((5, 3), "bfloat16"), "scale": ((4,), "float8_e4m3fn"), "mask": ((3,), "bool")})
    initial = memoryview(bytearray(torch.arange(schema.initial_bytes).to(torch.uint8).numpy().tobytes()))
    image = buffer(schema.record_bytes)
    fill_initial(schema, initial, image)
    for source, target in zip(schema.initial_fields(), schema.stored.fields, strict=True):
        found = image[target.offset_bytes : target.offset_bytes + target.length_bytes]
        assert found == initial[source.offset_bytes : source.offset_bytes + source.length_bytes]
