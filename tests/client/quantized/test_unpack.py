"""Quantized matrices have the bits of transformers' own conversions, in the native kernel and in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paramstore_client.quantized import unpack
from paramstore_native.dequantize import DEQUANTIZE

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.fixture(params=["native", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(DEQUANTIZE, "kernel", lambda: None)
    elif DEQUANTIZE.kernel() is None:
        pytest.skip(DEQUANTIZE.known_state())
    return str(request.param)


def random_bytes(*shape: int, seed: int, below: int = 256) -> Tensor:
    return torch.randint(below, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    kind = torch.int32 if ours.dtype.itemsize == 4 else torch.int16
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.view(kind)[~ours.isnan()], theirs.view(kind)[~theirs.isnan()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "grid"), [((256, 384), (2, 3)), ((96, 64), (1, 1)), ((10, 6), (5, 2))])
def test_fp8_is_that_of_transformers(
    shape: tuple[int, int], grid: tuple[int, int], scale_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    weight = random_bytes(*shape, seed=1).view(torch.float8_e4m3fn)
    scales = (torch.randn(grid, generator=torch.Generator().manual_seed(2)) * 0.02).to(scale_dtype)
    out = torch.empty(shape, dtype=dtype)
    unpack.fp8(weight, scales, out)
    assert_same_bits(out, Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exponents", [(110, 135), (0, 255)], ids=["usual", "all"])
@pytest.mark.parametrize(("rows", "groups"), [(64, 4), (33, 1), (1, 3)])
def test_mxfp4_is_that_of_transformers(rows: int, groups: int, exponents: tuple[int, int], dtype: torch.dtype) -> None:
    blocks = random_bytes(rows, groups, 16, seed=3)
    scales = random_bytes(rows, groups, seed=4, below=exponents[1] - exponents[0]) + exponents[0]
    out = torch.empty(groups * 32, rows, dtype=dtype)
    unpack.mxfp4(blocks, scales, out)
    assert_same_bits(out, convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0])


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_what_lies_with_gaps_is_made_too(kind: str) -> None:
    wide = torch.zeros(64, 64, dtype=torch.bfloat16)
    expected = torch.empty(64, 32, dtype=torch.bfloat16)
    for out in (wide[:, 16:48], expected):
        if kind == "fp8":
            unpack.fp8(random_bytes(64, 32, seed=5, below=120).view(torch.float8_e4m3fn), torch.ones(2, 1), out)
        else:
            unpack.mxfp4(random_bytes(32, 2, 16, seed=6), random_bytes(32, 2, seed=7, below=8) + 123, out)
    assert torch.equal(wide[:, 16:48], expected)
    assert not wide[:, :16].any()
    assert not wide[:, 48:].any()
