"""The SGD update of one chunk: bitwise that of `torch.optim.SGD(fused=True)` on fp32 parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paramstore.core.optimizers import SGD
from paramstore.optim.rule import Step


def step(master: Tensor, gradient: Tensor, states: Sequence[Tensor], made: Step, /) -> None:
    """See `Rule`. Without momentum the buffer is left alone, since torch makes none then."""
    options = made.options
    assert isinstance(options, SGD)
    torch._fused_sgd_(
        [master], [gradient], list(states) if options.momentum else [], weight_decay=options.weight_decay,
        momentum=options.momentum, lr=options.lr, dampening=options.dampening, nesterov=options.nesterov, maximize=False,
        is_first_step=made.count == 1,
    )  # fmt: skip
