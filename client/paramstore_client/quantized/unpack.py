"""Makes a matrix of its quantized bytes, with the bits that transformers' own conversions give.

On the CPU, in bfloat16, the native kernel does it where there is one, in torch's threads; elsewhere torch: on a device in the
current stream.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from paramstore_native.dequantize import DEQUANTIZE

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Of e2m1, by its four bits (OCP Microscaling Formats 1.0, section 5.3.3)."""
EXPONENT_BIAS = 127
"""Of e8m0."""


def fp8(weight: Tensor, scales: Tensor, out: Tensor) -> None:
    """weight [R, C] float8_e4m3fn, scales [r, c], one for each block of equal size -> out [R, C]: products in float32, rounded to
    the dtype of `out`."""
    (rows, columns), (scale_rows, scale_columns) = weight.shape, scales.shape
    scales = scales.float().contiguous()
    kernel = DEQUANTIZE.kernel() if _is_native(weight, out) else None
    if kernel is not None:
        kernel.fp8(
            weight.data_ptr(), scales.data_ptr(), out.data_ptr(), shape=(rows, columns), blocks=(scale_rows, scale_columns),
            threads=torch.get_num_threads(),
        )  # fmt: skip
        return
    apart = weight.float().view(scale_rows, rows // scale_rows, scale_columns, columns // scale_columns)
    out.copy_(apart.mul_(scales[:, None, :, None]).view(rows, columns))


def mxfp4(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    """blocks [n, g, 16] uint8, two values of e2m1 a byte, the lower four bits first; scales [n, g] uint8 of e8m0, none of them 255
    -> out [32 g, n]."""
    n, groups = scales.shape
    kernel = DEQUANTIZE.kernel() if _is_native(blocks, out) and scales.is_contiguous() else None
    if kernel is not None:
        threads = torch.get_num_threads()
        kernel.mxfp4(blocks.data_ptr(), scales.data_ptr(), out.data_ptr(), rows=n, groups=groups, threads=threads)
        return
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).int()
    scaled = torch.ldexp(_table(out.dtype, out.device)[nibbles], scales.int()[..., None] - EXPONENT_BIAS)
    out.copy_(scaled.view(n, -1).t())


@lru_cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values by their bits. On a device the first call waits for it."""
    with torch.inference_mode(False):
        return torch.tensor(FP4_VALUES, dtype=dtype).to(device)


def _is_native(packed: Tensor, out: Tensor) -> bool:
    is_on_host = packed.device.type == out.device.type == "cpu"
    return is_on_host and out.dtype is torch.bfloat16 and packed.is_contiguous() and out.is_contiguous()
