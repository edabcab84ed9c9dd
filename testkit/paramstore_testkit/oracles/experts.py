"""Expected contents of records, as torch's own AdamW makes them: values that never change in place and know nothing of a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW

Tensors = Mapping[str, Tensor]
"""Tensors by field or parameter; never changed in place."""
MASTER = "master/"


@dataclass(frozen=True, eq=False)
class Expert:
    """Contents of one record: its fields by their names in the stored part, and how often it was updated."""

    fields: Tensors
    updates: int = 0

    @classmethod
    def initial(cls, values: Tensors) -> Expert:
        """Makes an expert with these values and no update."""
        fields: dict[str, Tensor] = {}
        for name, value in values.items():
            zeros = torch.zeros_like(value)
            fields |= {MASTER + name: value, f"exp_avg/{name}": zeros, f"exp_avg_sq/{name}": zeros}
        return cls(fields)

    @property
    def masters(self) -> dict[str, Tensor]:
        """Masters of the expert, by the names of its parameters."""
        return {name.removeprefix(MASTER): value for name, value in self.fields.items() if name.startswith(MASTER)}

    def after(self, gradients: Tensors, options: AdamW) -> Expert:
        """Makes the expert after one step of torch's fused kernel; a parameter without a gradient gets one of zeros."""
        names, fields = list(self.masters), {name: value.clone() for name, value in self.fields.items()}
        masters, averages, squares = ([fields[f"{part}/{name}"] for name in names] for part in ("master", "exp_avg", "exp_avg_sq"))
        given = [gradients[name].float() if name in gradients else torch.zeros_like(fields[MASTER + name]) for name in names]
        torch._fused_adamw_(
            masters, given, averages, squares, [], [torch.tensor(float(self.updates + 1)) for _ in names], lr=options.lr,
            beta1=options.betas[0], beta2=options.betas[1], weight_decay=options.weight_decay, eps=options.eps, amsgrad=False,
            maximize=False,
        )  # fmt: skip
        return Expert(fields, self.updates + 1)


State = Mapping[ExpertKey, Expert]


def trained(state: State, gradients: Mapping[ExpertKey, Tensors], options: AdamW, *, is_exact: bool = False) -> State:
    """Makes the state after one apply. is_exact: experts without a gradient make its step too."""
    return {**state, **{key: state[key].after(gradients.get(key, {}), options) for key in (state if is_exact else gradients)}}


def check_expert(found: Tensors, expected: Expert, *, key: ExpertKey, step: object) -> None:
    """Asserts that every stored field is the expected one to the last bit."""
    for name, value in expected.fields.items():
        assert found[name].shape == value.shape
        wrong = int((found[name].view(torch.int32) != value.view(torch.int32)).sum())
        assert not wrong, f"step {step}, key {key}, {name}: {wrong} of {value.numel()} elements differ"
