"""The AdamW update of one stretch of a field in C (`adamw.c`), where the machine has a compiler and its torch gives the same bits.

What it gives is bitwise what `torch._fused_adamw_`, `torch.add`, `torch.mul` and the casts around them give, NaN aside: a NaN is a
NaN, which one is not promised.
"""

from __future__ import annotations

from pathlib import Path

from paramstore_native.adamw_kernel import Kernel
from paramstore_native.finder import Finder


def _objection(made: Kernel) -> str:
    if not made.serves("float32"):
        return "this CPU has no fused multiply-add"
    from paramstore_native.adamw_check import difference  # imports torch

    return difference(made)


SOURCE = Path(__file__).with_name("adamw.c")
ADAMW = Finder("AdamW", SOURCE, Kernel, _objection)
