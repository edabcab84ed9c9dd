"""Quantized matrices are made in C where that gives torch's bits."""

from __future__ import annotations

from paramstore_native.compiled import Unavailable
from paramstore_native.dequantize import DEQUANTIZE
from paramstore_native.dequantize_kernel import Kernel


def test_the_kernel_is_the_same_for_all_of_a_process() -> None:
    found = DEQUANTIZE.kernel()
    assert found is DEQUANTIZE.kernel()
    assert isinstance(found, Kernel) == (DEQUANTIZE.known_state() == "native")
    assert isinstance(DEQUANTIZE.load(), Kernel if found is not None else Unavailable)
