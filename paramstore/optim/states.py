"""Loads and stores optimizer states as `Schema.state_dtype` says; a step sees fp32 whatever that is.

- "float32": states are updated in place.
- "bfloat16": rounded stochastically after every step (`noise.py`).
- "int8_blockwise": 8-bit codes with one fp32 scale for each block of 256 elements, the block's largest magnitude: "8-bit
  Optimizers via Block-wise Quantization" (Dettmers et al., arXiv 2110.02861, section 2.1). Rounded to nearest, as there: noise as
  large as a step of 8 bits would add up over the thousand steps that `exp_avg_sq` remembers.

The code of a magnitude y = |x| / scale in [0, 1] is the integer next to L * y^(1/4): L = 127, with x's sign, for a signed state;
L = 255, stored less 128, for a state that is never negative. Each decade of y has 0.56 times as many codes as the one above it,
from 56 (signed) or 112 (unsigned) on. So the code has the shape of the paper's dynamic tree (section 1.3: half as many, from 64 or
128 on), and costs two square roots instead of a search among 256 values. In an unsigned state only 0 becomes 0: a small
`exp_avg_sq` that became 0 would make its next step as long as 1/eps ("Memory Efficient Optimizers with 4-bit States", Li et al.,
arXiv 2309.01507, section 3, the zero-point problem).
A block with an infinity or a NaN becomes NaN as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.schema import BLOCKWISE, STATE_BLOCK_ELEMENTS, Schema, StateFields
from paramstore.optim import chunks
from paramstore.optim.noise import StochasticRounding, mix

STATES_MAX = 2
"""The most states that any optimizer keeps."""
SIGNED_LEVELS = 127
UNSIGNED_LEVELS = 255
UNSIGNED_OFFSET = 128
SCALE_MIN = 2.0**-126
"""The least normal fp32 number: the reciprocal of a smaller scale may be infinite."""


class States(Protocol):
    """The optimizer states of a stretch of one field, chunk by chunk."""

    def load(self, index: int) -> Sequence[Tensor]:
        """Returns the states of chunk `index` in fp32, to be updated in place; valid until the next `load`."""
        ...

    def store(self, index: int, count: int) -> None:
        """Stores the tensors that `load` returned, as they are after the record's step `count`."""
        ...


class StateBuffers:
    """One thread's buffers for the states of a chunk."""

    def __init__(self) -> None:
        elements = chunks.REDUCED_CHUNK_ELEMENTS
        self.values = [torch.zeros(elements) for _ in range(STATES_MAX)]
        self.work = torch.zeros(elements)
        self.factors = torch.zeros(chunks.block_count(elements))
        self.rounding = StochasticRounding(elements)


def chunk_elements(schema: Schema) -> int:
    """The size of the chunks in which `open_states` gives the states."""
    return chunks.CHUNK_ELEMENTS if schema.state_dtype == "float32" else chunks.REDUCED_CHUNK_ELEMENTS


def open_states(
    schema: Schema, image: memoryview, number: int, start: int, sizes: list[int], *, key: ExpertKey,
    buffers: Callable[[], StateBuffers],
) -> States:  # fmt: skip
    """Opens the states of the schema's field `number` in a record's `image`, from element `start` on, in chunks of these sizes.
    buffers: returns the calling thread's; fp32 states need none."""
    fields = schema.state_fields()[number]
    values = [chunks.cut(image, field.values, start, sizes) for field in fields]
    if schema.state_dtype == "float32":
        return Float32States(values)
    if schema.state_dtype == BLOCKWISE:
        scales = [chunks.cut_blocks(image, field.scales, start, sizes) for field in fields if field.scales is not None]
        return BlockwiseStates(fields, values, scales, buffers())
    return BFloat16States(values, start, sizes, mix(*key, number), buffers())


class Float32States:
    """States that are updated where they lie."""

    def __init__(self, values: Sequence[tuple[Tensor, ...]]) -> None:
        self._chunks = list(zip(*values, strict=True))

    def load(self, index: int) -> Sequence[Tensor]:
        return self._chunks[index]

    def store(self, index: int, count: int) -> None:
        """Does nothing: the states were updated in place."""


class BFloat16States:
    """States in bf16, rounded stochastically. stream: a number on which the noise depends beside state, step and element."""

    def __init__(
        self, values: Sequence[tuple[Tensor, ...]], start: int, sizes: Sequence[int], stream: int, buffers: StateBuffers
    ) -> None:
        self._values = values
        self._starts = [start + sum(sizes[:index]) for index in range(len(sizes))]
        self._stream = stream
        self._buffers = buffers

    def load(self, index: int) -> Sequence[Tensor]:
        stored = [chunk[index] for chunk in self._values]
        return [room[: chunk.numel()].copy_(chunk) for room, chunk in zip(self._buffers.values, stored, strict=False)]

    def store(self, index: int, count: int) -> None:
        for place, (room, stored) in enumerate(zip(self._buffers.values, self._values, strict=False)):
            chunk = stored[index]
            self._buffers.rounding.round_into(
                chunk, room[: chunk.numel()], stream=mix(self._stream, place, count), start=self._starts[index]
            )


class BlockwiseStates:
    """States as 8-bit codes with a scale for each block. A last block that is not whole is treated as if zeros followed."""

    def __init__(
        self, fields: Sequence[StateFields], codes: Sequence[tuple[Tensor, ...]], scales: Sequence[tuple[Tensor, ...]],
        buffers: StateBuffers,
    ) -> None:  # fmt: skip
        self._stored = list(zip((field.state.is_signed for field in fields), codes, scales, buffers.values, strict=False))
        self._work = buffers.work
        self._factors = buffers.factors

    def load(self, index: int) -> Sequence[Tensor]:
        loaded = []
        for is_signed, codes, scales, room in self._stored:
            elements, blocks = codes[index].numel(), scales[index].numel()
            values = room[: blocks * STATE_BLOCK_ELEMENTS]
            values[elements:].zero_()
            decode(codes[index], scales[index], values, self._work[: values.numel()], is_signed=is_signed)
            loaded.append(room[:elements])
        return loaded

    def store(self, index: int, count: int) -> None:
        for is_signed, codes, scales, room in self._stored:
            blocks = scales[index].numel()
            values = room[: blocks * STATE_BLOCK_ELEMENTS]
            factors, work = self._factors[:blocks], self._work[: values.numel()]
            encode(values, codes[index], scales[index], factors, work, is_signed=is_signed)


def decode(codes: Tensor, scales: Tensor, values: Tensor, work: Tensor, *, is_signed: bool) -> None:
    """Fills `values` with the numbers that `codes` and `scales` stand for. values, work: fp32, whole blocks; elements of `values`
    beyond the codes are 0 before and after."""
    held = values[: codes.numel()].copy_(codes)
    if is_signed:
        magnitude = torch.div(values, SIGNED_LEVELS, out=work).square_().square_()
        torch.copysign(magnitude, values, out=values)
    else:
        held.add_(UNSIGNED_OFFSET).div_(UNSIGNED_LEVELS).square_().square_()
    values.view(-1, STATE_BLOCK_ELEMENTS).mul_(scales.unsqueeze(1))


def encode(values: Tensor, codes: Tensor, scales: Tensor, factors: Tensor, work: Tensor, *, is_signed: bool) -> None:
    """Writes `values` as codes and scales. values: fp32, whole blocks, zeros beyond the codes; garbage afterwards. factors, work:
    fp32 buffers, of one element for each block, and as large as `values`."""
    elements = codes.numel()
    magnitude = torch.abs(values, out=work) if is_signed else values
    torch.amax(magnitude.view(-1, STATE_BLOCK_ELEMENTS), dim=1, out=scales)
    torch.clamp(scales, min=SCALE_MIN, out=factors).reciprocal_()
    if is_signed:
        _to_levels(magnitude, factors, SIGNED_LEVELS)
        codes.copy_(torch.copysign(magnitude, values, out=magnitude)[:elements])
    else:
        least = torch.sign(values, out=work)
        _to_levels(magnitude, factors, UNSIGNED_LEVELS)
        codes.copy_(torch.maximum(magnitude, least, out=magnitude)[:elements].sub_(UNSIGNED_OFFSET))


def _to_levels(magnitude: Tensor, factors: Tensor, levels: int) -> None:
    magnitude.view(-1, STATE_BLOCK_ELEMENTS).mul_(factors.unsqueeze(1))
    magnitude.sqrt_().sqrt_().mul_(levels).round_()
