"""Quantized experts' matrices in C (`dequantize.c`), where the machine has a compiler and torch gives the same bits here.

What it gives is bitwise what transformers' own conversions give in bf16, NaN aside: a NaN is a NaN, which one is not promised.
"""

from __future__ import annotations

from pathlib import Path

from paramstore_native.dequantize_kernel import Kernel
from paramstore_native.finder import Finder


def _objection(made: Kernel) -> str:
    from paramstore_native.dequantize_check import difference  # imports torch

    return difference(made)


SOURCE = Path(__file__).with_name("dequantize.c")
DEQUANTIZE = Finder("dequantizing", SOURCE, Kernel, _objection)
