"""The kernel gives torch's bits for matrices of every shape, and writes nothing beside them."""

from __future__ import annotations

import pytest
import torch

from paramstore_native.dequantize import DEQUANTIZE
from paramstore_native.dequantize_check import fp8_by_torch, mxfp4_by_torch
from paramstore_native.dequantize_kernel import GROUP, Kernel

EDGE = 64
"""Elements before and behind the result."""


@pytest.fixture
def native() -> Kernel:
    found = DEQUANTIZE.kernel()
    if found is None:
        pytest.skip(DEQUANTIZE.known_state())
    return found


def framed(elements: int) -> torch.Tensor:
    return torch.full((elements + 2 * EDGE,), -7.0, dtype=torch.bfloat16)


def inside(frame: torch.Tensor) -> torch.Tensor:
    assert set(frame[:EDGE].tolist()) == set(frame[-EDGE:].tolist()) == {-7.0}
    return frame[EDGE:-EDGE]


@pytest.mark.parametrize(
    ("shape", "blocks"), [((128, 256), (1, 2)), ((1, 1), (1, 1)), ((6, 35), (2, 5)), ((7, 64), (7, 64)), ((40, 17), (1, 17))]
)
def test_fp8_of_every_shape(native: Kernel, shape: tuple[int, int], blocks: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(256, shape, dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    scales = torch.randn(blocks, generator=generator)
    out = framed(weight.numel())
    native.fp8(weight.data_ptr(), scales.data_ptr(), out.data_ptr() + 2 * EDGE, shape=shape, blocks=blocks, threads=2)
    assert torch.equal(inside(out).view(shape).nan_to_num(), fp8_by_torch(weight, scales).nan_to_num())


@pytest.mark.parametrize(("rows", "groups"), [(64, 4), (1, 1), (31, 3), (33, 1), (96, 2), (100, 5)])
@pytest.mark.parametrize("exponents", [(120, 134), (0, 8), (246, 255)], ids=str)
def test_mxfp4_of_every_shape(native: Kernel, rows: int, groups: int, exponents: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(256, (rows, groups, GROUP // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(*exponents, (rows, groups), dtype=torch.uint8, generator=generator)
    out = framed(groups * GROUP * rows)
    native.mxfp4(blocks.data_ptr(), scales.data_ptr(), out.data_ptr() + 2 * EDGE, rows=rows, groups=groups, threads=2)
    assert torch.equal(inside(out).view(groups * GROUP, rows), mxfp4_by_torch(blocks, scales))
