"""Stochastic rounding of fp32 to bf16, with noise that depends on nothing but which element is rounded at which step.

x becomes one of its two bf16 neighbours, the upper one with the probability (x - lower) / (upper - lower): right on average, so
that a moment to which each step adds less than half a bf16 step still moves (Gupta et al., "Deep Learning with Limited Numerical
Precision", arXiv 1502.02551, section 3.1). Adding 16 random bits below the 16 that are kept and cutting them off does it.

The random bits of an element are `table[i] * m + c`: the table is fixed, m (odd) and c come from a hash of the expert key, the
field, the state, the optimizer step and the block of elements. So the same update made again after a crash, in other pieces, by
another thread or on another machine gives the same bits, and no two steps or experts share their noise.
"""

from __future__ import annotations

from functools import lru_cache

import numpy
import torch
from torch import Tensor

NOISE_BLOCK_ELEMENTS = 1 << 17
"""Number of elements that share m and c. Records' bits depend on it: another size would give other noise."""
TABLE_SEED = 0x70617261
MASK_64 = (1 << 64) - 1
CUT_BITS = 16


def mix(*words: int) -> int:
    """Mixes these numbers into 64 bits (SplitMix64's finalizer, Steele, Lea, Flood 2014, section 4, chained)."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
        state ^= state >> 31
    return state


@lru_cache(maxsize=1)
def _table() -> Tensor:
    """Random numbers below 2^16 for one block, to which nobody may write. Philox's stream is fixed by its paper and by numpy."""
    raw = numpy.random.Philox(key=TABLE_SEED).random_raw(NOISE_BLOCK_ELEMENTS)
    return torch.from_numpy((raw >> 48).astype(numpy.int32))


class StochasticRounding:
    """Rounds in one thread, with buffers of its own. elements: the most that it rounds at once."""

    def __init__(self, elements: int) -> None:
        self._table = _table()
        self._bits = torch.empty(elements, dtype=torch.int32)
        self._addend = torch.zeros((), dtype=torch.int32)

    def round_into(self, target: Tensor, values: Tensor, *, stream: int, start: int) -> None:
        """Rounds `values` (fp32) into `target` (bf16). start: index of the first one in its field; all must be in one block.
        stream: 64 bits on which the noise depends too. Infinities stay, and so do NaNs as arithmetic makes them; a NaN whose kept
        bits are all set may become a zero (the step that made it has made the master a NaN as well)."""
        count = values.numel()
        within = start % NOISE_BLOCK_ELEMENTS
        assert within + count <= NOISE_BLOCK_ELEMENTS
        random = mix(stream, start // NOISE_BLOCK_ELEMENTS)
        bits = self._bits[:count]
        # Nothing overflows: the table is below 2^16, m below 2^14.
        self._addend.fill_(random & 0xFFFF)
        torch.add(self._addend, self._table[within : within + count], alpha=(random >> 16) & 0x3FFF | 1, out=bits)
        bits.bitwise_and_(0xFFFF)
        bits.add_(values.view(torch.int32))
        bits.bitwise_right_shift_(CUT_BITS)
        target.view(torch.int16).copy_(bits)
