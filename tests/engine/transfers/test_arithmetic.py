"""How an update is cut: every element once, in about equal pieces that begin where vectors do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from paramstore.core.schema import Schema
from paramstore.engine.transfers.arithmetic import SPAN_ALIGNMENT_ELEMENTS, Span, cut_update

SHAPES: list[Mapping[str, tuple[int, ...]]] = [
    {"w": (1,)}, {"w": (7,), "v": (3, 5)}, {"w": (4096, 3)}, {"w": (100, 1000), "b": (10,), "v": (300, 300)},
    {"a": (4095,), "b": (4097,), "c": (8192,)},
]  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES, ids=[str(number) for number in range(len(SHAPES))])
@pytest.mark.parametrize("piece_elements", [1, 4096, 10_000, 1 << 30])
def test_every_element_is_in_exactly_one_piece(shapes: Mapping[str, tuple[int, ...]], piece_elements: int) -> None:
    schema = Schema.adamw(shapes)
    pieces = cut_update(schema, piece_elements)
    assert all(pieces), "no piece is empty"
    ends = [0] * len(shapes)
    for field, start, end in (span for piece in pieces for span in piece):
        assert start == ends[field]
        assert start < end
        assert start % SPAN_ALIGNMENT_ELEMENTS == 0
        ends[field] = end
    assert ends == [field.elements for field in schema.gradient_fields()]


def test_pieces_are_about_equal_and_no_larger_than_asked_for() -> None:
    schema = Schema.adamw({"gate_up": (1620, 2048), "down": (2048, 810)})
    sizes = [sum(end - start for _, start, end in piece) for piece in cut_update(schema, 1 << 21)]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) <= 3 * SPAN_ALIGNMENT_ELEMENTS
    assert max(sizes) <= (1 << 21) + SPAN_ALIGNMENT_ELEMENTS


def test_a_small_record_is_one_piece() -> None:
    assert cut_update(Schema.adamw({"w": (3, 5), "v": (7,)})) == ((Span(0, 0, 15), Span(1, 0, 7)),)


@pytest.mark.slow
def test_what_came_with_torch_is_kept_from_the_collector_and_nothing_later_is() -> None:
    """In a process of its own: garbage that is frozen is never freed."""
    command = """
import gc
from paramstore.engine.transfers.arithmetic import load
load()
count = gc.get_freeze_count()
assert count > 10_000, count
load()
assert gc.get_freeze_count() == count
"""
    subprocess.run([sys.executable, "-c", command], check=True, timeout=60)
