"""The history of a layer: what all ranks have counted, and no more batches than are kept."""

from __future__ import annotations

import torch

from paramstore_client.moe.balance.history import BATCHES, TokenHistory
from paramstore_client.moe.exchange import FlatExchange
from paramstore_client.nn.routing import Block
from paramstore_testkit.training.thread_ranks import of_all, run_ranks

CPU = torch.device("cpu")


def test_all_ranks_have_the_sum_of_what_each_counted_of_its_own() -> None:
    def rank(exchange: FlatExchange) -> list[list[int]]:
        history = TokenHistory(4)
        history.add([Block(2 * exchange.rank, 1 + exchange.rank), Block(2 * exchange.rank + 1, 7)])
        history.add([] if exchange.rank else [Block(3, 2), Block(0, 6), Block(3, 3)])
        assert len(history) == 2
        return history.of_all(exchange, CPU)

    assert of_all(run_ranks(2, rank)) == [[[1, 7, 2, 7], [6, 0, 0, 5]]] * 2


def test_the_last_batches_are_kept() -> None:
    def rank(exchange: FlatExchange) -> list[list[int]]:
        history = TokenHistory(1)
        assert history.of_all(exchange, CPU) == []
        for batch in range(BATCHES + 3):
            history.add([Block(0, batch)])
        return history.of_all(exchange, CPU)

    assert of_all(run_ranks(2, rank))[0] == [[2 * batch] for batch in range(3, BATCHES + 3)]
