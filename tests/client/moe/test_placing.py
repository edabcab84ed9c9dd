"""Experts are placed anew between two steps, on all ranks or on none; what is computed is the same before and after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paramstore.core.balancing import AS_IT_IS, GREEDY, busiest_share
from paramstore.core.placement import Placement
from paramstore.errors import ConfigError, StepMismatch
from paramstore_client.moe.exchange import FlatExchange
from paramstore_client.moe.pipeline_plan import Pipeline
from paramstore_client.moe.placing import place, rebalance
from paramstore_client.nn import StoredExperts
from paramstore_testkit.training.parallel_job import Job
from paramstore_testkit.training.thread_ranks import ThreadParallel, of_all, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

JOB = Job()
RANKS = len(JOB.tokens)


class Rank:
    """One rank's layer, and its tokens."""

    def __init__(self, exchange: FlatExchange, job: Job = JOB, pipeline: Pipeline | None = None) -> None:
        self.exchange = exchange
        self.parallel = ThreadParallel(exchange, pipeline=pipeline)
        self.namespace = job.namespace()
        self.module = StoredExperts(self.namespace, 0, parallel=self.parallel)
        self.layers = self.parallel.layers
        self.inputs = [drawn[job.parts[exchange.rank]] for drawn in job.draw()]

    def forward(self) -> Tensor:
        x, ids, gates, _ = self.inputs
        return self.module(x.clone().requires_grad_(), ids, gates)  # type: ignore[no-any-return]

    def pushed(self) -> set[int]:
        """Computes a forward and a backward; gives the experts of which this rank pushed gradients, which are dropped."""
        self.forward().backward(self.inputs[3])
        experts = {expert for _, expert in self.namespace.pending}
        self.namespace.pending.clear()
        return experts


def _reversed(world_size: int, experts: int = JOB.experts) -> Placement:
    return Placement(Placement.in_order(experts, world_size).ranks[::-1], world_size)


def test_with_another_placement_each_rank_computes_other_experts_and_what_comes_back_is_the_same() -> None:
    def rank(exchange: FlatExchange) -> tuple[Tensor, Tensor, set[int], set[int]]:
        mine = Rank(exchange)
        before, first = mine.forward().detach(), mine.pushed()
        place(exchange, mine.layers, {0: _reversed(RANKS)})
        return before, mine.forward().detach(), first, mine.pushed()

    for number, (before, after, first, second) in enumerate(of_all(run_ranks(RANKS, rank))):
        assert torch.equal(before, after)
        assert first <= set(Placement.in_order(JOB.experts, RANKS).of_rank(number))
        assert second <= set(_reversed(RANKS).of_rank(number))
        assert first.isdisjoint(second)


@pytest.mark.parametrize("parts", [1, 2])
def test_nothing_is_placed_while_one_rank_alone_awaits_a_backward(parts: int) -> None:
    def rank(exchange: FlatExchange) -> str:
        mine = Rank(exchange, pipeline=Pipeline(parts))
        y = mine.forward()
        if exchange.rank != 2:
            del y  # the graph is gone, and with it the backward
        with pytest.raises(StepMismatch) as raised:
            place(exchange, mine.layers, {0: _reversed(RANKS)})
        assert mine.layers[0].placement == Placement.in_order(JOB.experts, RANKS)
        if exchange.rank == 2:
            del y
        place(exchange, mine.layers, {0: _reversed(RANKS)})
        assert mine.layers[0].placement == _reversed(RANKS)
        return str(raised.value)

    said = of_all(run_ranks(RANKS, rank))
    assert said[2].startswith("experts are not placed within a step: layer 0 awaits the backward")
    assert said[0] == said[1] == said[3] == f"rank 2: {said[2]}"


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_is_over_after_its_backward_though_its_loss_is_kept(parts: int) -> None:
    def rank(exchange: FlatExchange) -> None:
        mine = Rank(exchange, pipeline=Pipeline(parts))
        loss = mine.forward().sum()
        loss.backward()
        place(exchange, mine.layers, {0: _reversed(RANKS)})
        assert loss.grad_fn is not None

    of_all(run_ranks(RANKS, rank))


def test_ranks_that_want_different_placements_are_named_and_nothing_changes() -> None:
    def rank(exchange: FlatExchange) -> None:
        mine = Rank(exchange, Job(tokens=(3, 2)))
        wanted = _reversed(2) if exchange.rank else Placement.in_order(JOB.experts, 2)
        with pytest.raises(StepMismatch, match=r"differ in placement: \d+ on rank 0; \d+ on rank 1"):
            place(exchange, mine.layers, {0: wanted})
        assert mine.layers[0].placement == Placement.in_order(JOB.experts, 2)
        mine.pushed()  # all are in step

    of_all(run_ranks(2, rank))


def test_a_rank_that_computes_where_others_place_is_named() -> None:
    def rank(exchange: FlatExchange) -> None:
        mine = Rank(exchange, Job(tokens=(3, 2)))
        with pytest.raises(StepMismatch, match="differ in phase: place on rank 0; forward on rank 1"):
            mine.forward() if exchange.rank else place(exchange, mine.layers, {0: _reversed(2)})

    of_all(run_ranks(2, rank))


@pytest.mark.parametrize(
    ("placements", "says"),
    [
        ({0: _reversed(2, experts=15)}, "placement of layer 0: it is of 15 experts on 2 ranks, the layer has 16, the job 2"),
        ({0: _reversed(3)}, "it is of 16 experts on 3 ranks"),
        ({7: _reversed(2)}, "placement of layer 7: the layers with experts are 0"),
    ],
    ids=["experts", "ranks", "layer"],
)
def test_a_placement_that_does_not_fit_is_refused_on_all_ranks(placements: Any, says: str) -> None:
    def rank(exchange: FlatExchange) -> None:
        mine = Rank(exchange, Job(tokens=(3, 2)))
        with pytest.raises(ConfigError, match=says):
            place(exchange, mine.layers, placements if exchange.rank else {0: _reversed(2)})
        assert mine.layers[0].placement == Placement.in_order(JOB.experts, 2)

    of_all(run_ranks(2, rank))


def test_experts_are_spread_by_the_tokens_of_all_ranks() -> None:
    """All tokens go to the experts of the first rank: they are spread, alike everywhere, and batches of other placements count."""

    def rank(exchange: FlatExchange) -> tuple[Any, list[list[int]]]:
        mine = Rank(exchange)
        mine.inputs[1] = mine.inputs[1] % 4
        for batch in range(6):
            if batch == 3:
                place(exchange, mine.layers, {0: _reversed(RANKS)})
                place(exchange, mine.layers, {0: Placement.in_order(JOB.experts, RANKS)})
            mine.pushed()
        choice = rebalance(exchange, mine.layers)[0]
        assert mine.layers[0].placement == choice.placement
        return choice, mine.layers[0].history.of_all(exchange, torch.device("cpu"))

    found = of_all(run_ranks(RANKS, rank))
    (choice, history), _ = found[0], [each for each in found if each != found[0]]
    assert all(each == found[0] for each in found)
    counts = torch.bincount((JOB.draw()[1] % 4).flatten(), minlength=JOB.experts).tolist()
    assert history == [counts] * 6
    assert choice.name == GREEDY
    assert choice.shares[AS_IT_IS] == busiest_share(history, Placement.in_order(JOB.experts, RANKS)) == 1
    assert choice.shares[GREEDY] == max(counts) / sum(counts)


def test_ranks_with_histories_of_different_length_are_refused_before_one_is_sent() -> None:
    def rank(exchange: FlatExchange) -> None:
        mine = Rank(exchange, Job(tokens=(3, 2)))
        mine.pushed()
        if exchange.rank:
            mine.layers[0].history.add([])
        with pytest.raises(StepMismatch, match="differ in placement"):
            rebalance(exchange, mine.layers)

    of_all(run_ranks(2, rank))


def test_without_batches_experts_stay_where_they_lie() -> None:
    def rank(exchange: FlatExchange) -> str:
        return rebalance(exchange, Rank(exchange, Job(tokens=(3, 2))).layers)[0].name

    assert of_all(run_ranks(2, rank)) == [AS_IT_IS] * 2
