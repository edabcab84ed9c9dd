"""What a layer whose experts are spread over ranks is given: who brings its rows to them. `ps.moe` has the maker."""

# T tokens of this rank, N rows of them, M rows of this rank's experts, D model
# ruff: noqa: N803 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paramstore_client.nn.routing import Block, Taken
from paramstore_client.source import ExpertSource

Anchor = Callable[[], Tensor | None] | None
"""Returns the leaf that ties a call into the caller's graph, or None where the weights get no gradients; None where nobody bound
the model."""
Guard = Callable[[], AbstractContextManager[None]]
"""A block whose exception the other ranks learn."""


Local = Callable[[tuple[Block, ...], Tensor, Anchor, Guard], Tensor]
"""(blocks, x_MD in expert order, anchor, guard) -> y_MD, computed with this rank's experts. What backward does by itself is done
within the guard."""


class ParallelRows(Protocol):
    """Brings the rows of one layer to the ranks of their experts, and back."""

    def guard(self, device: torch.device) -> AbstractContextManager[None]:
        """A block before `run`, whose exception the other ranks raise too."""
        ...

    def run(self, x_TD: Tensor, taken: Taken, counts_G: Tensor, *, top_k: int, local: Local, anchor: Anchor) -> Tensor:
        """y [N, D], each row through its expert, wherever that is.

        taken: the rows, sorted by group, an expert's groups after the one's before. counts_G: how many rows each group has, on the
        host, as many groups of each expert. This rank's experts that have rows are asked for before these are sent.
        """
        ...


@runtime_checkable
class Parallel(Protocol):
    """Spreads a model's experts over ranks."""

    def layer(self, source: ExpertSource, layer: int, /) -> ParallelRows | None:
        """What brings the rows of `layer`; None where this rank is alone."""
        ...
