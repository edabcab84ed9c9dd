"""Chunks cover what they should, and their borders depend on nothing but their size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramstore.core.schema import Schema
from paramstore.optim import chunks
from paramstore.optim.chunks import block_count, chunk_sizes, cut, cut_blocks
from paramstore.optim.noise import NOISE_BLOCK_ELEMENTS
from paramstore_testkit.oracles.optim_records import buffer


@given(st.integers(0, 10_000), st.integers(1, 10_000), st.sampled_from([1, 256, 1000, 4096]))
def test_chunks_cover_the_stretch_and_end_on_multiples(start: int, elements: int, size: int) -> None:
    sizes = chunk_sizes(start, start + elements, size)
    borders = [start]
    for each in sizes:
        assert each > 0
        borders.append(borders[-1] + each)
    assert borders[-1] == start + elements
    assert all(border % size == 0 for border in borders[1:-1])
    assert max(sizes) <= size


@pytest.mark.parametrize(("elements", "blocks"), [(1, 1), (255, 1), (256, 1), (257, 2), (1024, 4)])
def test_a_block_that_is_not_whole_counts(elements: int, blocks: int) -> None:
    assert block_count(elements) == blocks


def test_chunks_of_a_field_and_of_its_scales_lie_where_they_should() -> None:
    schema = Schema.sgd({"w": (1000,)}, state_dtype="int8_blockwise")
    image = buffer(schema.record_bytes)
    codes, scales = schema.stored.field("momentum_buffer/w"), schema.stored.field("momentum_buffer_scale/w")
    assert [chunk.numel() for chunk in cut(image, codes, 512, [256, 232])] == [256, 232]
    parts = cut_blocks(image, scales, 512, [256, 232])
    assert [part.numel() for part in parts] == [1, 1]
    parts[1].fill_(3.0)
    whole = cut(image, scales, 0, [4])[0]
    assert whole[3] == 3.0
    assert whole[2] != 3.0


def test_reduced_chunks_fit_noise_and_quantisation_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert NOISE_BLOCK_ELEMENTS % chunks.REDUCED_CHUNK_ELEMENTS == 0
    assert chunks.REDUCED_CHUNK_ELEMENTS % 256 == 0
