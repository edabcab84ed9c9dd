"""The C functions of `dequantize.c` as Python calls them: one expert's matrix, by addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cffi

GROUP = 32
"""Values of mxfp4 that share a scale; two are in a byte."""

_ffi = cffi.FFI()
_ffi.cdef(
    """
    void paramstore_fp8(
        const uint8_t *weight, const float *scales, uint16_t *out, size_t rows, size_t cols, size_t block_rows, size_t block_cols,
        unsigned threads);
    void paramstore_mxfp4(
        const uint8_t *blocks, const uint8_t *scales, uint16_t *out, size_t rows, size_t groups, unsigned threads);
    """
)


class Kernel:
    """The functions of one built library. Any thread may call them; the GIL is released meanwhile. Arrays lie without gaps, and
    stay where they are during a call. threads: how many of torch's OpenMP to use, if that was loaded before; else it is one."""

    def __init__(self, file: Path) -> None:
        """Raises OSError or AttributeError if `file` is no such library."""
        library: Any = _ffi.dlopen(str(file))  # its functions are known at run time only
        self._fp8, self._mxfp4 = library.paramstore_fp8, library.paramstore_mxfp4

    def fp8(
        self, weight: int, scales: int, out: int, *, shape: tuple[int, int], blocks: tuple[int, int], threads: int
    ) -> None:
        """weight: `shape` e4m3, scales: `blocks` fp32, one for each block of equal size -> out: `shape` bf16."""
        (rows, cols), (block_rows, block_cols) = shape, (shape[0] // blocks[0], shape[1] // blocks[1])
        assert (rows, cols) == (blocks[0] * block_rows, blocks[1] * block_cols)
        self._fp8(
            _ffi.cast("uint8_t *", weight), _ffi.cast("float *", scales), _ffi.cast("uint16_t *", out), rows, cols, block_rows,
            block_cols, threads,
        )  # fmt: skip

    def mxfp4(self, blocks: int, scales: int, out: int, *, rows: int, groups: int, threads: int) -> None:
        """blocks: [rows, groups, 16] bytes of two values, the lower four bits first; scales: [rows, groups] e8m0
        -> out: [groups * 32, rows] bf16."""
        self._mxfp4(
            _ffi.cast("uint8_t *", blocks), _ffi.cast("uint8_t *", scales), _ffi.cast("uint16_t *", out), rows, groups, threads
        )
