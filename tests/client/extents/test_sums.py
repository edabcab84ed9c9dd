"""Torch's device sums are those of the host."""

from __future__ import annotations

import pytest
import torch

from paramstore.core.checksums import device_sums as on_host
from paramstore.core.checksums import pack_sums
from paramstore.core.schema import Part, Schema
from paramstore_client.extents.sums import device_sums, multipliers_on

CPU = torch.device("cpu")
SEED = 50


def image_of(part: Part) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(0, 256, (part.image_bytes,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("fields", [
    {"w": ((1000, 1000), "bfloat16"), "b": ((1 << 20,), "uint8")}, {"w": ((3,), "uint8")}, {"w": ((5, 262_145), "uint8")},
])  # fmt: skip
def test_they_are_equal_whatever_the_lengths_of_the_fields(fields: dict[str, tuple[tuple[int, ...], str]]) -> None:
    part = Schema.param(fields).stored
    image = image_of(part)
    found = device_sums(image, part, multipliers_on(CPU)).numpy().astype("<i8").tobytes()
    assert found == pack_sums(on_host(memoryview(image.numpy()), part.chunks()))


def test_they_are_equal_in_inference_mode_and_in_two_threads() -> None:
    part = Schema.param({"w": ((3, 1 << 19), "bfloat16")}).stored
    image, odd = image_of(part), multipliers_on(CPU)
    expected, threads = device_sums(image, part, odd), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            assert torch.equal(device_sums(image, part, odd), expected)
    finally:
        torch.set_num_threads(threads)
