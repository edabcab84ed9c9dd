"""Keeps how many tokens each expert of a layer had, batch by batch: what a placement is chosen by.

A rank counts what it computes. What all have counted of a batch is summed when somebody asks, so that it costs a forward nothing.
"""

# B batches, E experts, W ranks
# ruff: noqa: N806 - shape suffixes, as the legend says

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from paramstore_client.moe.exchange import Exchange
from paramstore_client.nn.routing import Block

BATCHES = 64
"""How many of a layer's last batches are kept: with 256 experts that is 128 KiB."""


class TokenHistory:
    """Owner of the counts of one layer's last BATCHES batches. Each forward is one; all ranks have as many."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._batches: deque[list[int]] = deque(maxlen=BATCHES)

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, blocks: Iterable[Block]) -> None:
        """Keeps a batch, of which this rank computes `blocks`."""
        tokens = [0] * self._experts
        for block in blocks:
            tokens[block.expert] += block.row_count
        self._batches.append(tokens)

    def of_all(self, exchange: Exchange, device: torch.device) -> list[list[int]]:
        """The history that all ranks together have, the same on each: a row for each batch, a column for each expert. Every rank
        calls it, after as many batches."""
        if not self._batches:
            return []
        tokens_BE = torch.tensor([*self._batches], dtype=torch.int64, device=device).view(len(self), self._experts)
        counted_WBE = exchange.alike(tokens_BE.repeat(exchange.world_size, 1, 1))
        return counted_WBE.sum(0).tolist()
