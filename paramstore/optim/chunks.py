"""Cuts the elements of a field into chunks for computing, so that each operation finds the data of the one before in a cache."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from paramstore.core.schema import STATE_BLOCK_ELEMENTS, Field
from paramstore.optim.tensors import field_tensor

CHUNK_ELEMENTS = 1 << 19
"""Elements that are cast, updated and cast back before the next ones.

Measured on two Zen 5 cores (1 MiB of L2 each, 32 MiB of L3): a tenth to a sixth better than whole records. Smaller chunks
gain nothing: two workers are bound by memory, one loses 8 (fp32) to 13 us (bf16) a chunk to the calls. A multiple of the
widest vector, so that no bit depends on it.
"""

REDUCED_CHUNK_ELEMENTS = 1 << 17
"""Chunk size where states are not fp32: their fp32 values and the noise are buffers of this size, which some 20 (bf16) to 40 (8
bits) calls go over. Half of it costs a sixth more CPU time, twice as much saves next to nothing. It divides NOISE_BLOCK_ELEMENTS,
and is whole blocks of a blockwise state."""


def chunk_sizes(start: int, end: int, chunk_elements: int) -> list[int]:
    """Sizes of the chunks of elements [start, end): every border but the outer ones is a multiple of `chunk_elements`."""
    borders = [start, *range((start // chunk_elements + 1) * chunk_elements, end, chunk_elements), end]
    return [after - before for before, after in pairwise(borders)]


def cut(image: memoryview, field: Field, start: int, sizes: list[int]) -> tuple[Tensor, ...]:
    """Cuts the field's elements in `image`, from element `start` on, into chunks of these sizes."""
    tensor = field_tensor(image, field)
    if sizes == [field.elements]:
        return (tensor,)  # small records, of which there are many
    return torch.split(tensor.narrow(0, start, sum(sizes)), sizes)


def cut_blocks(image: memoryview, field: Field, start: int, sizes: list[int]) -> tuple[Tensor, ...]:
    """Cuts a scale field for chunks of these sizes: one scale for each of their blocks. Element `start` must begin a block."""
    return cut(image, field, start // STATE_BLOCK_ELEMENTS, [block_count(size) for size in sizes])


def block_count(elements: int) -> int:
    """Number of blocks that so many elements take, from the start of a block on."""
    return -(-elements // STATE_BLOCK_ELEMENTS)
