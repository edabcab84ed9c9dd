"""What a file of one optimizer provides, and what it gets.

An optimizer is one function, `step`: it knows nothing of records, dtypes of states, ranks or threads. `optim/update.py` calls it
with fp32 tensors of one chunk and takes care of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paramstore.core.optimizers import Options


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of a record. count: torch's `step` after it, 1 for the record's first. count_tensor: the same as torch's
    optimizers keep it, an fp32 scalar. is_missed: its gradient is zero."""

    options: Options
    count: int
    count_tensor: Tensor
    is_missed: bool


class Rule(Protocol):
    """One step of some elements, in place, allocating nothing.

    master: fp32, flat. gradient: the same, read only; each element is read once, since another process may write to it meanwhile.
    states: as `Options.states` orders them, fp32, flat; zeros before the first step.
    """

    def __call__(self, master: Tensor, gradient: Tensor, states: Sequence[Tensor], made: Step, /) -> None: ...
