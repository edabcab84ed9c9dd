"""The Adagrad update of one chunk: bitwise that of `torch.optim.Adagrad(fused=True)` on fp32 parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paramstore.core.optimizers import Adagrad
from paramstore.optim.rule import Step


def step(master: Tensor, gradient: Tensor, states: Sequence[Tensor], made: Step, /) -> None:
    """See `Rule`."""
    options = made.options
    assert isinstance(options, Adagrad)
    if made.count == 1 and options.initial_accumulator_value:
        states[0].fill_(options.initial_accumulator_value)
    torch._fused_adagrad_(
        [master], [gradient], [states[0]], [made.count_tensor], lr=options.lr, lr_decay=options.lr_decay,
        weight_decay=options.weight_decay, eps=options.eps, maximize=False,
    )  # fmt: skip
