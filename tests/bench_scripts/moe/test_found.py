"""Layers that differ, or that send other rows than the routing says, are an error and no figure."""

from __future__ import annotations

import math

import pytest

from paramstore.errors import StepMismatch
from paramstore_bench.moe.found import ROUNDING, check_equal, check_sent


def test_rounding_alone_may_differ() -> None:
    check_equal({"y": 0.0, "gates": ROUNDING})
    for value in (2 * ROUNDING, math.nan):
        with pytest.raises(StepMismatch, match=r"more than 1e-05 of the largest element: \{'gates': "):
            check_equal({"y": 0.0, "gates": value})


def test_bytes_are_as_many_as_the_routing_says() -> None:
    check_sent(8, 8)
    with pytest.raises(StepMismatch, match="9 bytes of rows went to other ranks, the routing says 8"):
        check_sent(9, 8)
