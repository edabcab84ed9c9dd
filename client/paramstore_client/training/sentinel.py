"""The two tensors by which a model's stored experts take part in autograd and in an optimizer's step.

- `anchor`, an unregistered leaf, goes into the graph of every stored layer, so that its backward runs even where neither its
  input nor its routing weights need a gradient.
- `sentinel`, a registered scalar parameter that stays 0, stands for all experts in whatever looks at parameters: its gradient is
  the experts' norm, so that a clipping by the global norm counts them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ExpertSentinel(nn.Module):
    """The child module `paramstore` of a model whose experts are stored: a child, as DDP ignores by "module.param" only."""

    def __init__(self) -> None:
        super().__init__()
        self.sentinel = nn.Parameter(torch.zeros(()))
        self._anchor = [torch.zeros((), requires_grad=True)]  # in a list: a tensor attribute would be moved and counted

    @property
    def anchor(self) -> Tensor:
        """A scalar leaf that needs a gradient; its value means nothing."""
        return self._anchor[0]
