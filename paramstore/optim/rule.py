"""The interface of an optimizer.

An optimizer is one function, `step`, in a file of its own: it knows nothing of records, dtypes of states, ranks or threads.
`optim/update.py` calls it with fp32 tensors of one chunk and takes care of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paramstore.core.optimizers import Options


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of a record. count: torch's `step` after it, 1 for the record's first. count_tensor: `count` as an fp32
    scalar, as torch's optimizers keep it. is_missed: its gradient is zero."""

    options: Options
    count: int
    count_tensor: Tensor
    is_missed: bool


class Rule(Protocol):
    """Makes one step of some elements, in place, and allocates nothing.

    master: fp32, flat. gradient: fp32, flat, not to be written; each element is read once, since another process may write to it
    meanwhile. states: in the order of `Options.states`, fp32, flat; zeros before the first step.
    """

    def __call__(self, master: Tensor, gradient: Tensor, states: Sequence[Tensor], made: Step, /) -> None: ...
