"""The AdamW update of one chunk: bitwise that of `torch.optim.AdamW(fused=True)` on fp32 parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paramstore.core.optimizers import AdamW
from paramstore.optim.rule import Step


def step(master: Tensor, gradient: Tensor, states: Sequence[Tensor], made: Step, /) -> None:
    """See `Rule`."""
    options = made.options
    assert isinstance(options, AdamW)
    torch._fused_adamw_(
        [master], [gradient], [states[0]], [states[1]], [], [made.count_tensor], lr=options.lr, beta1=options.betas[0],
        beta2=options.betas[1], eps=options.eps, weight_decay=options.weight_decay, amsgrad=False, maximize=False,
    )  # fmt: skip
