"""Exchanges: what each rank gets, and who is named when one does not come."""

from __future__ import annotations

import re
import threading

import pytest
import torch

from paramstore.errors import RankLost, StepMismatch
from paramstore_client.moe.exchange import FlatExchange
from paramstore_testkit.training.thread_ranks import of_all, run_ranks

SENT = [[0, 2, 1], [3, 0, 0], [1, 1, 1]]
"""Rows from each rank to each."""


def _rows(rank: int, to: int) -> list[list[float]]:
    return [[100.0 * rank + 10.0 * to + number, 0.5] for number in range(SENT[rank][to])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rows_arrive_by_rank_in_the_order_in_which_they_were_sent(dtype: torch.dtype) -> None:
    def rank(exchange: FlatExchange) -> torch.Tensor:
        mine = exchange.rank
        sent = torch.tensor([row for to in range(3) for row in _rows(mine, to)], dtype=dtype).view(-1, 2)
        return exchange.rows(sent, to_each=SENT[mine], from_each=[from_rank[mine] for from_rank in SENT])

    for mine, got in enumerate(of_all(run_ranks(3, rank))):
        wanted = torch.tensor([row for other in range(3) for row in _rows(other, mine)], dtype=dtype).view(-1, 2)
        assert torch.equal(got, wanted)


def test_each_rank_has_a_message_of_each() -> None:
    def rank(exchange: FlatExchange) -> list[list[int]]:
        return exchange.alike(torch.tensor([[exchange.rank, to] for to in range(2)])).tolist()

    assert of_all(run_ranks(2, rank)) == [[[0, 0], [1, 0]], [[0, 1], [1, 1]]]


def test_whoever_does_not_come_is_named_and_the_exchange_stays_broken() -> None:
    given_up = threading.Semaphore(0)

    def rank(exchange: FlatExchange) -> list[str]:
        said = []
        if exchange.rank == 1:
            assert all(given_up.acquire(timeout=20.0) for _ in range(2))
        else:
            for _ in range(2):
                with pytest.raises((StepMismatch, RankLost)) as raised:
                    exchange.alike(torch.zeros(3, 1))
                said.append(str(raised.value))
            given_up.release()
        return said

    first, absent, third = of_all(run_ranks(3, rank, timeout_s=0.5))
    assert absent == []
    late = "expert-parallel ranks: rank 1 did not come to an exchange within 0.5 s"
    assert any(said[0].startswith(late) for said in (first, third))
    for said in (first, third):  # whose wait ran out first broke the connections of the other
        assert "rank 1" in said[0]
        assert said[0] == said[1]


def test_a_rank_that_has_left_is_named() -> None:
    def rank(exchange: FlatExchange) -> str:
        if exchange.rank == 1:
            return ""
        with pytest.raises(RankLost) as raised:
            exchange.alike(torch.zeros(3, 1))
        return str(raised.value)

    first, _, third = of_all(run_ranks(3, rank))
    for said in (first, third):  # who of the others notices late on a busy machine is named too
        assert re.match(r"expert-parallel ranks: ranks? (0, )?1(, 2)? left an exchange; the group is broken", said)


def test_who_knows_better_which_rank_is_gone_is_asked() -> None:
    def rank(exchange: FlatExchange) -> str:
        if exchange.rank == 1:
            return ""
        with pytest.raises(RankLost) as raised:
            exchange.alike(torch.zeros(2, 1))
        return str(raised.value)

    assert of_all(run_ranks(2, rank, lost=lambda: RankLost("rank 1 is gone")))[0] == "rank 1 is gone"
