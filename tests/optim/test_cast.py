"""`param` is made from the masters, whole or piece by piece, with torch's rounding."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from paramstore.core.schema import ITEM_BYTES, Schema
from paramstore.optim.cast import cast_range, materialise
from paramstore.optim.tensors import field_tensor, torch_dtype

SHAPES = {"gate_up": (33, 65), "down": (5001,)}
DTYPES = ["float32", "bfloat16", "float16"]


def random_record(schema: Schema) -> memoryview:
    image = memoryview(bytearray(schema.record_bytes))
    for field in schema.stored.fields:
        field_tensor(image, field).normal_()
    return image


@pytest.mark.parametrize("dtype", DTYPES)
def test_param_holds_the_masters_in_its_own_dtype(dtype: str) -> None:
    schema = Schema.adamw(SHAPES, param_dtype=dtype)
    image, param = random_record(schema), memoryview(bytearray(schema.part("param").image_bytes))
    materialise(schema, image, param)
    for field in schema.part("param").fields:
        master = field_tensor(image, schema.stored.field(f"master/{field.name}"))
        assert torch.equal(field_tensor(param, field), master.to(torch_dtype(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_of_any_element_count_cast_as_the_whole(dtype: str) -> None:
    values = torch.cat([torch.randn(5001), torch.tensor([0.0, -0.0, float("inf"), 65519.9, 1e-30])])
    source = memoryview(bytearray(values.numpy().tobytes()))
    target = memoryview(bytearray(values.numel() * ITEM_BYTES[dtype]))
    borders = [0, 1, 8, 1024, 4099, values.numel()]
    for start, end in pairwise(borders):
        item_bytes = ITEM_BYTES[dtype]
        cast_range(source[4 * start : 4 * end], target[item_bytes * start : item_bytes * end], dtype)
    assert torch.equal(torch.frombuffer(target, dtype=torch_dtype(dtype)), values.to(torch_dtype(dtype)))


def test_ranges_of_unequal_element_counts_are_refused() -> None:
    with pytest.raises(AssertionError):
        cast_range(memoryview(bytearray(16)), memoryview(bytearray(6)), "bfloat16")
