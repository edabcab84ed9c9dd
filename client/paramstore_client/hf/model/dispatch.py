"""Tells the host which experts a layer's tokens chose, with one transfer from the device."""

# T tokens, K experts per token, E experts of the layer, G guesses
# ruff: noqa: N803, N806, N815 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paramstore.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """The choice of one layer's tokens.

    experts: those that have tokens, ascending. counts: their numbers of rows, of all T * K. positions_TK: each choice as a position
    in `experts`, int64, on the tokens' device. guesses: as they were given.
    """

    experts: Sequence[int]
    counts: Sequence[int]
    positions_TK: Tensor
    guesses: Sequence[int]


def look_up(ids_TK: Tensor, *, experts: int, guesses_G: Tensor | None = None) -> Dispatch:
    """The dispatch of `ids_TK`, integers below `experts`: what `torch.unique` gives, without its second wait for the device.

    guesses_G: integers of any shape on the same device, for whoever loads ahead: they come in the same transfer. Raises ConfigError
    while a CUDA graph is captured: it would have the experts of one token for all.
    """
    if ids_TK.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "stored experts cannot be captured in a CUDA graph: which of them are needed is known on the host alone. For "
            "generate_batch give ContinuousBatchingConfig(use_cuda_graph=False)"
        )
    ids_N = ids_TK.reshape(-1).long()
    if not len(ids_N) and guesses_G is None:
        return Dispatch([], [], ids_TK.long(), [])
    counts_E = torch.zeros(experts, dtype=torch.int64, device=ids_N.device).scatter_add_(0, ids_N, torch.ones_like(ids_N))
    positions_TK = ((counts_E > 0).cumsum(0) - 1)[ids_N].view(ids_TK.shape)
    told = counts_E if guesses_G is None else torch.cat([counts_E, guesses_G.reshape(-1).long()])
    on_host = told.tolist()  # the layer's one wait for the device
    found = [(expert, count) for expert, count in enumerate(on_host[:experts]) if count]
    return Dispatch([expert for expert, _ in found], [count for _, count in found], positions_TK, on_host[experts:])
