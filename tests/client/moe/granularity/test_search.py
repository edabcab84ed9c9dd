"""Ranks choose alike, by what they tell each other with headers; whatever is tried, no bit changes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paramstore.core.placement import Placement
from paramstore.errors import CapacityError, ConfigError, StepMismatch
from paramstore_client.moe.exchange import Exchange, FlatExchange
from paramstore_client.moe.granularity import trial
from paramstore_client.moe.granularity.clock import Clock, Times
from paramstore_client.moe.granularity.model import Curve
from paramstore_client.moe.granularity.search import MOST_PROBED_BYTES, MOST_UNDER_WAY, Kind, Search
from paramstore_client.moe.granularity.trial import PipelineChoice
from paramstore_client.moe.hops.choice import ExchangeChoice
from paramstore_client.moe.hops.node_rows import NodeRowExchange
from paramstore_client.moe.hops.nodes import Nodes
from paramstore_client.moe.kernel_order import ParallelKernel
from paramstore_client.moe.parallel_layer import ParallelLayer
from paramstore_client.moe.pipeline_plan import Pipeline, PipelineSearch
from paramstore_client.nn import StoredExperts
from paramstore_client.source import ExpertSource
from paramstore_testkit.training.parallel_job import Computed, Job
from paramstore_testkit.training.thread_ranks import ThreadParallel, of_all, run_ranks

KIND = Kind(records=True, experts=32, top_k=2, row_bytes=1024)
CURVE = Curve(((1, 0.001), (1 << 20, 0.4)))
MOST_CALLS = 60


class Ended(Clock):
    """A call that took as long as it says."""

    def __init__(self, times: Times) -> None:
        self._times = times

    def times(self) -> Times:
        return self._times


class Ranks:
    """Searches of several ranks, which hear each other. Each rank's layer takes another time."""

    def __init__(self, count: int = 3) -> None:
        self.searches = [Search(PipelineSearch()) for _ in range(count)]
        self.calls = 0
        self.probed: list[tuple[int, ...]] = []

    def begin(self, rows: Sequence[int], *, kind: Kind = KIND, failing: int | None = None) -> tuple[int, Pipeline]:
        """The number of a call of all, and the pipeline that all have. failing: a rank that fails before it plans the call."""
        number, ranks = self.calls, [rank for rank in range(len(self.searches)) if rank != failing]
        self.calls += 1
        plans = [self.searches[rank].next(kind) for rank in ranks]
        assert len({self.searches[rank].word(plan) for rank, plan in zip(ranks, plans, strict=True)}) == 1
        assert len(set(plans)) == 1
        if failing is not None:
            return number, plans[0].pipeline
        told = [search.telling(count) for search, count in zip(self.searches, rows, strict=True)]
        for search in self.searches:
            search.hear(kind, number, plans[0], told)
            if plans[0].sizes_bytes:
                search.note_exchanges(kind, plans[0], CURVE)
        if plans[0].sizes_bytes:
            self.probed.append(plans[0].sizes_bytes)
        return number, plans[0].pipeline

    def end(self, number: int, pipeline: Pipeline, *, failing: int | None = None) -> None:
        """Ends a call on all ranks but one that fails."""
        for rank, search in enumerate(self.searches):
            if rank != failing:
                seconds = (0.3 + 0.7 / pipeline.parts) * (1 + rank / 10)
                search.end(number, Ended(Times(seconds, 0.2, 2 * seconds, 0.4)))

    def call(self, rows: Sequence[int]) -> Pipeline:
        number, pipeline = self.begin(rows)
        self.end(number, pipeline)
        return pipeline

    def search(self, rows: Sequence[int]) -> PipelineChoice:
        """Calls until another choice is there."""
        before = len(self.choices())
        for _ in range(MOST_CALLS):
            self.call(rows)
            if len(self.choices()) > before:
                return self.choices()[-1]
        raise AssertionError(f"nothing was chosen in {MOST_CALLS} calls")

    def choices(self) -> tuple[PipelineChoice, ...]:
        assert len({search.choices for search in self.searches}) == 1
        return self.searches[0].choices


def test_ranks_that_measure_different_times_choose_alike() -> None:
    ranks = Ranks()
    choice = ranks.search((100, 0, 300))
    assert choice.pipeline.parts > 1
    assert choice.rows == 384
    assert ranks.call((100, 0, 300)) == choice.pipeline


def test_each_number_of_rows_has_a_choice_of_its_own_but_those_between_equal_ones() -> None:
    ranks = Ranks()
    low, high = ranks.search((100, 100, 100)), ranks.search((400, 400, 400))
    assert low.pipeline == high.pipeline
    ranks.call((200, 200, 200))
    assert ranks.call((200, 200, 200)) == low.pipeline
    assert ranks.choices() == (low, high)


def test_exchanges_of_sizes_that_were_measured_are_not_measured_again() -> None:
    ranks = Ranks()
    ranks.search((400, 400, 400))
    ranks.search((300, 300, 300))
    assert len(ranks.probed) == 1
    ranks.search((4000, 4000, 4000))
    assert [max(sizes) for sizes in ranks.probed] == [400 * 1024, 4000 * 1024]
    ranks.search((1_000_000, 0, 0))
    assert max(ranks.probed[-1]) == MOST_PROBED_BYTES


def test_times_of_other_rows_than_planned_are_not_counted_and_nothing_is_tried_for_ever() -> None:
    ranks, had = Ranks(), []
    for _ in range(2 * trial.MOST_BEGUN):
        had += [ranks.call((100, 100, 100)), ranks.call((700, 700, 700))]
    assert ranks.choices() == ()
    assert set(had[-trial.MOST_BEGUN :]) == {Pipeline()}


def test_calls_without_a_backward_are_forgotten() -> None:
    ranks = Ranks(1)
    for _ in range(2 * MOST_UNDER_WAY):
        ranks.begin((100,))
    assert len(ranks.searches[0]._under_way) <= MOST_UNDER_WAY


def test_calls_without_a_row_are_no_trial() -> None:
    ranks = Ranks()
    for _ in range(3):
        ranks.call((0, 0, 0))
    for _ in range(MOST_CALLS):
        ranks.call((0, 0, 0))
        ranks.call((100, 0, 300))
        if ranks.choices():
            return
    raise AssertionError("nothing was chosen")


def test_layers_whose_backwards_come_last_first_are_all_counted() -> None:
    ranks = Ranks()
    for _ in range(MOST_CALLS):
        begun = [ranks.begin((100, 200, 300)) for _ in range(5)]
        for number, pipeline in reversed(begun):
            ranks.end(number, pipeline)
        if ranks.choices():
            return
    raise AssertionError("nothing was chosen")


def test_a_call_that_fails_on_one_rank_leaves_all_in_step() -> None:
    ranks = Ranks()
    for number in range(5):
        ranks.call((100, 0, 300))
        ranks.begin((100, 0, 300), failing=number % 3)
        ranks.end(*ranks.begin((100, 0, 300)), failing=number % 3)
    assert ranks.search((100, 0, 300)).pipeline.parts > 1


def _searched(parallel: ThreadParallel) -> tuple[PipelineChoice, ...]:
    assert isinstance(parallel.pipeline, Search)
    return parallel.pipeline.choices


def _passed(flat: FlatExchange, job: Job, exchange: Exchange) -> tuple[list[Computed], tuple[PipelineChoice, ...]]:
    parallel, namespace = ThreadParallel(exchange, pipeline=PipelineSearch(most_parts=4)), job.namespace()
    found: list[Computed] = []
    while not _searched(parallel) and len(found) < MOST_CALLS:
        namespace.pending.clear()
        found.append(Computed.of(job, namespace, job.parts[flat.rank], parallel))
    return found, _searched(parallel)


@pytest.mark.parametrize("gain", [0.0, 1e9], ids=["any wins", "none wins"])
@pytest.mark.parametrize("is_hopping", [False, True], ids=["flat", "two hops"])
def test_a_layer_that_searches_computes_what_one_process_does(
    monkeypatch: pytest.MonkeyPatch, gain: float, is_hopping: bool
) -> None:
    monkeypatch.setattr(trial, "GAIN", gain)
    job = Job(tokens=(20, 0, 33, 7))
    alone, nodes = Computed.of(job, job.namespace()), Nodes.named("aabb")
    choice = ExchangeChoice(("two_hops", "row_per_node"), "told", nodes)

    def rank(flat: FlatExchange) -> tuple[list[Computed], tuple[PipelineChoice, ...]]:
        return _passed(flat, job, NodeRowExchange(flat, nodes, lambda _: choice) if is_hopping else flat)

    ranks = of_all(run_ranks(len(job.tokens), rank))
    for together in zip(*(found for found, _ in ranks), strict=True):
        Computed.together(together).check_equal(alone)
    assert len({choices for _, choices in ranks}) == 1
    (found,) = ranks[0][1]
    is_base_best = found.estimates[0].seconds == min(each.seconds for each in found.estimates)
    assert (found.pipeline == Pipeline()) == (gain > 1 or is_base_best)


def test_ranks_that_search_among_others_are_told() -> None:
    def rank(exchange: FlatExchange) -> None:
        pipeline = PipelineSearch(most_parts=2) if exchange.rank else None
        Computed.of(Job(), Job().namespace(), Job().parts[exchange.rank], ThreadParallel(exchange, pipeline=pipeline))

    for error in run_ranks(4, rank):
        assert isinstance(error, StepMismatch)
        assert "search" in str(error)


def test_a_rank_that_refuses_a_call_goes_on_searching_with_the_others() -> None:
    job = Job(tokens=(9, 4))

    def rank(exchange: FlatExchange) -> tuple[PipelineChoice, ...]:
        parallel = ThreadParallel(exchange, pipeline=PipelineSearch())
        x, ids, gates, grad = (drawn[job.parts[exchange.rank]] for drawn in job.draw())
        layer = StoredExperts(job.namespace(), 0, parallel=parallel)
        for number in range(MOST_CALLS):
            if number % 3 == 1:
                with pytest.raises(ConfigError):
                    layer(x, ids + (1000 if exchange.rank == 1 else 0), gates)
            layer(x.clone().requires_grad_(), ids, gates).backward(grad)
            if _searched(parallel):
                break
        return _searched(parallel)

    first, second = of_all(run_ranks(2, rank))
    assert first == second
    assert len(first) == 1


def test_strategies_whose_copies_do_not_fit_are_left_out() -> None:
    job = Job(tokens=(9, 4))

    def rank(exchange: FlatExchange) -> tuple[int, tuple[PipelineChoice, ...]]:
        parallel = ThreadParallel(exchange, pipeline=PipelineSearch(reuses=("keep", "S1", "S2"), host_bytes=1))
        x, ids, gates, grad = (drawn[job.parts[exchange.rank]] for drawn in job.draw())
        layer, failed = StoredExperts(job.namespace(), 0, parallel=parallel), 0
        for _ in range(2 * MOST_CALLS):
            try:
                layer(x.clone().requires_grad_(), ids, gates).backward(grad)
            except CapacityError:
                failed += 1
            if _searched(parallel):
                break
        return failed, _searched(parallel)

    first, second = of_all(run_ranks(2, rank))
    assert first == second
    failed, (choice,) = first
    assert failed == 2 * trial.FAILURES
    assert choice.pipeline.reuse == "keep"


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["without reentry", "reentrant"])
def test_a_checkpoint_around_a_kernel_recomputes_what_it_did(monkeypatch: pytest.MonkeyPatch, use_reentrant: bool) -> None:
    monkeypatch.setattr(trial, "GAIN", 0.0)

    def rank(exchange: FlatExchange) -> tuple[PipelineChoice, ...]:
        search, resident = Search(PipelineSearch()), cast(ExpertSource, SimpleNamespace(lease_slots=0, prefetch=lambda keys: None))
        rows = ParallelLayer(exchange, Placement.in_order(8, 2), resident, 0, step=lambda: 0, pipeline=search)
        kernel = ParallelKernel(rows, experts=8, kernel="grouped_mm")
        x, ids, gates, grad = (drawn[:12] for drawn in Job(tokens=(12,), experts=8, top_k=2).draw())

        def layer(x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
            return kernel.run(x, ids, gates, lambda hidden, *_, **__: hidden.tanh().exp(), anchor=None)

        for number in range(24):
            count = 12 if number % 5 else 6
            y = checkpoint(layer, x[:count].clone().requires_grad_(), ids[:count], gates[:count], use_reentrant=use_reentrant)
            y.backward(grad[:count])
        return search.choices

    first, second = of_all(run_ranks(2, rank))
    assert first == second


def test_a_forward_without_a_graph_is_searched_by_itself() -> None:
    job = Job(tokens=(9, 4))

    @torch.no_grad()
    def rank(exchange: FlatExchange) -> tuple[PipelineChoice, ...]:
        parallel = ThreadParallel(exchange, pipeline=PipelineSearch())
        x, ids, gates, _ = (drawn[job.parts[exchange.rank]] for drawn in job.draw())
        layer = StoredExperts(job.namespace(), 0, parallel=parallel)
        for _ in range(MOST_CALLS):
            layer(x, ids, gates)
        return _searched(parallel)

    first, second = of_all(run_ranks(2, rank))
    assert first == second
    assert all(each.backward is None for choice in first for each in choice.estimates)
    assert len(first) == 1
