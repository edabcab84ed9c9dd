"""Tokens that go once to each node give the rows of the flat exchange, bit for bit, and as many bytes as the formula says."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from paramstore_client.moe.exchange import FlatExchange
from paramstore_client.moe.hops.choice import Crossing, ExchangeChoice
from paramstore_client.moe.hops.node_rows import NodeRowExchange
from paramstore_client.moe.hops.nodes import Nodes
from paramstore_client.moe.pipeline_plan import Pipeline
from paramstore_testkit.training.counted_exchange import CountedExchange
from paramstore_testkit.training.parallel_job import Computed, Job
from paramstore_testkit.training.thread_ranks import ThreadParallel, of_all, run_ranks

NODES = {"2 x 2": "aabb", "2 x 3": "aaabbb", "3 x 2": "aabbcc", "mixed up": "abba", "one each": "ab"}
TOKENS, WIDTH = 40, 6


def sending(flat: FlatExchange, stand: str) -> NodeRowExchange:
    nodes = Nodes.named(stand)
    return NodeRowExchange(flat, nodes, lambda _: ExchangeChoice(("row_per_node",), "told", nodes))


def routed(rank: int, size: int, *, tokens: int = TOKENS, top_k: int = 3, experts_each: int = 2) -> tuple[Tensor, list[int]]:
    """The token of each row, by the rank of its expert, and how many rows go to each."""
    drawn = torch.Generator().manual_seed(rank)
    ids = torch.rand(tokens, size * experts_each, generator=drawn).topk(min(top_k, size * experts_each), dim=1)[1].sort(1)[0]
    order = ids.flatten().argsort(stable=True)
    to_each = torch.bincount(ids.flatten() // experts_each, minlength=size).tolist()
    return order // ids.shape[1], to_each


def from_each(rank: int, size: int, **options: int) -> list[int]:
    return [routed(other, size, **options)[1][rank] for other in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stand", NODES.values(), ids=NODES)
def test_rows_are_those_of_the_flat_exchange(stand: str, dtype: torch.dtype) -> None:
    size = len(stand)

    def rank(flat: FlatExchange) -> None:
        exchange = sending(flat, stand)
        for tokens in (TOKENS, 1, 0):
            token, to_each = routed(flat.rank, size, tokens=tokens)
            x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(flat.rank)).to(dtype)
            came = from_each(flat.rank, size, tokens=tokens)
            wanted = flat.start_tokens(x, token, to_each=to_each, from_each=came).wait()
            assert torch.equal(exchange.start_tokens(x, token, to_each=to_each, from_each=came).wait(), wanted)

    of_all(run_ranks(size, rank))


def test_one_rank_has_all_tokens_and_one_gets_all_rows() -> None:
    def rank(flat: FlatExchange) -> list[float]:
        has = flat.rank == 1
        x, token = torch.arange(2.0)[:, None][: 2 * has], torch.tensor([0, 1, 1, 0] * has, dtype=torch.int64)
        arriving = sending(flat, "aabb").start_tokens(
            x, token, to_each=[0, 0, 0, 4 * has], from_each=[0, 4 * (flat.rank == 3), 0, 0]
        )
        return arriving.wait().flatten().tolist()

    assert of_all(run_ranks(4, rank)) == [[], [], [], [0.0, 1.0, 1.0, 0.0]]


def test_what_crosses_is_a_row_for_each_token_and_node_and_two_tables() -> None:
    """Beside it, what each rank tells each other: four numbers."""

    def rank(flat: FlatExchange) -> tuple[int, int]:
        counted = CountedExchange.of(flat, Nodes.named("aabb"))
        token, to_each = routed(flat.rank, 4, top_k=4, experts_each=4)
        came = from_each(flat.rank, 4, top_k=4, experts_each=4)
        sending(counted, "aabb").start_tokens(torch.zeros(TOKENS, WIDTH), token, to_each=to_each, from_each=came).wait()
        to = torch.arange(4).repeat_interleave(torch.tensor(to_each)).tolist()
        away = [one for one, other in zip(token.tolist(), to, strict=True) if other // 2 != flat.rank // 2]
        return counted.crossing_bytes, len(set(away)) * (4 * WIDTH + 2) + 4 * len(away) + 2 * 4 * 8

    for crossing_bytes, wanted in of_all(run_ranks(4, rank)):
        assert crossing_bytes == wanted


def test_a_call_that_gains_nothing_goes_row_by_row_on_all_ranks() -> None:
    told: list[Crossing] = []

    class Never(ExchangeChoice):
        def sends_once(self, crossing: Crossing) -> bool:
            told.append(crossing)
            return False

    def rank(flat: FlatExchange) -> int:
        nodes = Nodes.named("ab")
        exchange = NodeRowExchange(flat, nodes, lambda _: Never(("row_per_node",), "told", nodes))
        to_each, came = ([1, 1], [1, 2]) if flat.rank == 0 else ([2, 1], [1, 1])
        token = torch.zeros(sum(to_each), dtype=torch.int64)
        exchange.start_tokens(torch.zeros(1, 2), token, to_each=to_each, from_each=came).wait()
        return flat.sent_bytes

    assert of_all(run_ranks(2, rank)) == [4 * 8 + 8, 4 * 8 + 16]
    assert told == [Crossing(row_bytes=16, token_bytes=8, spread_bytes=24)] * 2


def test_rows_that_come_back_are_in_turn_with_tokens() -> None:
    """With either way, or both: all send by one thread."""

    def rank(flat: FlatExchange) -> None:
        nodes = Nodes.named("aabb")
        token, to_each = routed(flat.rank, 4)
        came, x = from_each(flat.rank, 4), torch.randn(TOKENS, WIDTH)
        for ways in (("row_per_node",), ("two_hops", "row_per_node")):
            exchange = NodeRowExchange(flat, nodes, lambda _, ways=ways: ExchangeChoice(ways, "told", nodes))  # type: ignore[misc]
            there = [exchange.start_tokens(x + number, token, to_each=to_each, from_each=came) for number in range(3)]
            back = [exchange.start_rows(each.wait(), to_each=came, from_each=to_each) for each in there]
            for number, each in enumerate(back):
                assert torch.equal(each.wait(), (x + number)[token])

    of_all(run_ranks(4, rank))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pipeline", [None, Pipeline(parts=2), Pipeline(parts=2, split="tokens", reuse="S4")], ids=str)
@pytest.mark.parametrize("ways", [("two_hops",), ("row_per_node",), ("two_hops", "row_per_node")], ids=str)
def test_a_layer_is_that_of_the_flat_exchange(ways: tuple[str, ...], pipeline: Pipeline | None) -> None:
    """Output and gradients, whole and in parts, with a rank that has no tokens."""
    job, nodes = Job(tokens=(5, 0, 4, 6), experts=8, top_k=3), Nodes.named("aabb")

    def computed(rank: FlatExchange, *, is_flat: bool) -> Computed:
        exchange = rank if is_flat else NodeRowExchange(rank, nodes, lambda _: ExchangeChoice(ways, "told", nodes))
        return Computed.of(job, job.namespace(), job.parts[rank.rank], ThreadParallel(exchange, None, pipeline))

    flat, hopping = (Computed.together(of_all(run_ranks(4, partial(computed, is_flat=is_flat)))) for is_flat in (True, False))
    hopping.check_equal(flat)
