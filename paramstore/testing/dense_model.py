"""What an exact namespace means: `torch.optim.AdamW(fused=True)` over one stacked parameter per field, idle experts with a gradient
of zeros. Every state is a value, so that one can go back to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW

Stacked = dict[str, torch.Tensor]
"""By field, [keys, elements]; never changed in place."""
Gradients = Mapping[ExpertKey, Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class DenseState:
    """masters, averages, squares: in order of `keys`. step: how many applies it has had."""

    keys: tuple[ExpertKey, ...]
    masters: Stacked
    averages: Stacked
    squares: Stacked
    step: int = 0

    @classmethod
    def initial(cls, keys: Sequence[ExpertKey], elements: Mapping[str, int]) -> DenseState:
        """Masters that differ from key to key, and zeros."""
        generator = torch.Generator().manual_seed(len(keys))
        masters = {name: torch.randn(len(keys), count, generator=generator) for name, count in elements.items()}
        averages, squares = ({name: torch.zeros_like(value) for name, value in masters.items()} for _ in range(2))
        return cls(tuple(keys), masters, averages, squares)

    def after(self, gradients: Gradients, options: AdamW) -> DenseState:
        """The state after one step of torch's optimizer; zeros for keys without a gradient."""
        parameters = {name: value.clone().requires_grad_() for name, value in self.masters.items()}
        averages = {name: value.clone() for name, value in self.averages.items()}
        squares = {name: value.clone() for name, value in self.squares.items()}
        optimizer = torch.optim.AdamW(
            list(parameters.values()), lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay,
            fused=True,
        )  # fmt: skip
        for name, parameter in parameters.items():
            step = torch.tensor(float(self.step))
            optimizer.state[parameter] = {"step": step, "exp_avg": averages[name], "exp_avg_sq": squares[name]}
            parameter.grad = torch.zeros_like(parameter)
            for key, fields in gradients.items():
                parameter.grad[self.keys.index(key)] = fields[name].float()
        optimizer.step()
        masters = {name: parameter.detach() for name, parameter in parameters.items()}
        return DenseState(self.keys, masters, averages, squares, self.step + 1)

    def row(self, key: ExpertKey, prefix: str, name: str) -> torch.Tensor:
        """One field of one expert, flat; prefix: `master`, `exp_avg` or `exp_avg_sq`."""
        part = {"master": self.masters, "exp_avg": self.averages, "exp_avg_sq": self.squares}[prefix]
        return part[name][self.keys.index(key)]
