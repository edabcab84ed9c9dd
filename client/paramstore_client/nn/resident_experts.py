"""A layer with its experts as ordinary parameters in memory: the reference that `StoredExperts` equals bit for bit."""

# T tokens, K experts per token, N = T * K rows, D model
# ruff: noqa: N803 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from paramstore.core.arguments import function, wrong
from paramstore_client.nn.routing import Block, ExpertFn, Taken, apply_experts, split_rows, swiglu


class ResidentExperts(nn.Module):
    """Experts as `nn.Parameter`s named `weights.<expert>.<field>`; one that gets no token keeps `grad` None.

    weights: the fields of each expert; they are copied.
    """

    def __init__(self, weights: Sequence[Mapping[str, Tensor]], expert_fn: ExpertFn | None = None) -> None:
        super().__init__()
        if isinstance(weights, str) or not isinstance(weights, Sequence) or not all(_are_fields(fields) for fields in weights):
            raise wrong("weights", weights, "per expert {field: tensor}")
        self.expert_fn: ExpertFn = swiglu if expert_fn is None else function("expert_fn", expert_fn)
        self.weights = nn.ModuleList(
            nn.ParameterDict({field: nn.Parameter(value.detach().clone()) for field, value in fields.items()}) for fields in weights
        )

    def forward(self, x_TD: Tensor, expert_ids_TK: Tensor, gate_TK: Tensor) -> Tensor:
        """y_TD: per token the sum over its experts of gate * expert(x), as `StoredExperts.forward` gives it."""
        return apply_experts(self._run_blocks, x_TD, expert_ids_TK, gate_TK)

    def _run_blocks(self, blocks: tuple[Block, ...], x_TD: Tensor, taken: Taken) -> Tensor:
        return torch.cat(
            [
                self.expert_fn(x_tD, dict(cast(nn.ParameterDict, self.weights[block.expert])))
                for block, x_tD in zip(blocks, split_rows(taken.rows(x_TD), blocks), strict=True)
            ]
        )


def _are_fields(fields: object) -> bool:
    return isinstance(fields, Mapping) and all(isinstance(value, Tensor) for value in fields.values())
