"""Checks whether the native kernel gives torch's bits on this machine, once per process, before it is used.

Every byte of fp8 meets scales of every size, every nibble of mxfp4 every exponent but 255, which is no number and of which torch
makes infinity or a number by turns; odd numbers of rows and groups are among them.
"""

from __future__ import annotations

import torch

from paramstore_native.dequantize_kernel import GROUP, Kernel

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP8_SHAPES = (((256, 256), (2, 2)), ((6, 40), (3, 5)), ((5, 33), (1, 1)), ((3, 7), (3, 7)))
"""(shape of a matrix, shape of its scales)"""
MXFP4_SHAPES = ((256, 16), (33, 3), (1, 1), (31, 2))
"""(rows, groups)"""
MXFP4_RANGE, MXFP4_LEASTS = 40, (1, 2, 107, 213, 214)
"""How many exponents follow each other, and the least: products are normal numbers of bf16 for exponents from 2 to 252."""
THREADS = (1, 3)
"""In how many each is made."""


def difference(kernel: Kernel) -> str:
    """The first difference between the kernel's results and torch's, in words; empty if there is none."""
    with torch.device("cpu"):  # whatever the program's default is
        return _difference(kernel, torch.Generator().manual_seed(21))


def _difference(kernel: Kernel, generator: torch.Generator) -> str:
    for shape, grid in FP8_SHAPES:
        weight = _bytes(shape, generator).view(torch.float8_e4m3fn)
        plain = torch.rand(grid, generator=generator, dtype=torch.float32)
        halfway = torch.randint(8, 16, grid, generator=generator).float() * 2 + 1  # by an odd number of fp8: between two of bf16
        any_bits = _bytes((*grid, 4), generator).view(torch.float32)[..., 0]
        for scales in (plain, plain * 2.0**-120, plain * 2.0**120, plain * 2.0**127, halfway, any_bits):
            expected = fp8_by_torch(weight, scales)
            for threads in THREADS:
                if reason := _compared(f"fp8 {shape}", fp8_by_kernel(kernel, weight, scales, threads=threads), expected):
                    return reason
    for rows, groups in MXFP4_SHAPES:
        blocks = _bytes((rows, groups, GROUP // 2), generator)
        every = torch.arange(rows * groups, dtype=torch.int32).remainder(255).to(torch.uint8).view(rows, groups)
        for exponents in (every, *(every.remainder(MXFP4_RANGE) + least for least in MXFP4_LEASTS)):
            expected = mxfp4_by_torch(blocks, exponents)
            for threads in THREADS:
                found = mxfp4_by_kernel(kernel, blocks, exponents, threads=threads)
                if reason := _compared(f"mxfp4 {rows} x {groups}", found, expected):
                    return reason
    return ""


def fp8_by_kernel(kernel: Kernel, weight: torch.Tensor, scales: torch.Tensor, *, threads: int = 1) -> torch.Tensor:
    """weight [R, C] e4m3, scales [r, c] fp32 -> [R, C] bf16."""
    scales, out = scales.contiguous(), torch.empty(weight.shape, dtype=torch.bfloat16)
    rows, cols = weight.shape
    kernel.fp8(
        weight.data_ptr(), scales.data_ptr(), out.data_ptr(), shape=(rows, cols), blocks=(scales.shape[0], scales.shape[1]),
        threads=threads,
    )  # fmt: skip
    return out


def fp8_by_torch(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """weight [R, C] e4m3, scales [r, c] fp32 -> [R, C] bf16: products in fp32, then rounded."""
    (rows, cols), (scale_rows, scale_cols) = weight.shape, scales.shape
    apart = weight.float().view(scale_rows, rows // scale_rows, scale_cols, cols // scale_cols)
    return (apart * scales[:, None, :, None]).to(torch.bfloat16).view(rows, cols)


def mxfp4_by_kernel(kernel: Kernel, blocks: torch.Tensor, exponents: torch.Tensor, *, threads: int = 1) -> torch.Tensor:
    """blocks [n, g, 16] uint8, exponents [n, g] uint8 -> [g * 32, n] bf16."""
    rows, groups = exponents.shape
    out = torch.empty(groups * GROUP, rows, dtype=torch.bfloat16)
    kernel.mxfp4(blocks.data_ptr(), exponents.data_ptr(), out.data_ptr(), rows=rows, groups=groups, threads=threads)
    return out


def mxfp4_by_torch(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """blocks [n, g, 16] uint8, exponents [n, g] uint8 -> [g * 32, n] bf16."""
    values = torch.tensor(FP4_VALUES, dtype=torch.bfloat16)
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).int()
    scaled = torch.ldexp(values[nibbles], exponents.int()[..., None] - 127).to(torch.bfloat16)
    return scaled.flatten(1).t().contiguous()


def _compared(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> str:
    differ = (ours.view(torch.int16) != theirs.view(torch.int16)) & ~(ours.isnan() & theirs.isnan())
    if not (count := int(differ.sum())):
        return ""
    return f"{count} of {differ.numel()} elements of {what} differ from those of torch {torch.__version__}"


def _bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)
