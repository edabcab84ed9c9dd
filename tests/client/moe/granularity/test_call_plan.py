"""A call on trial is timed: what its experts take as computing, what ranks wait for each other before it not at all."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from paramstore.core.placement import Placement
from paramstore_client.moe.exchange import Arriving, FlatExchange
from paramstore_client.moe.granularity import clock
from paramstore_client.moe.granularity.call_plan import FixedPlan
from paramstore_client.moe.granularity.clock import Clock, Times
from paramstore_client.moe.granularity.search import Search
from paramstore_client.moe.kernel_order import ParallelKernel
from paramstore_client.moe.parallel_layer import ParallelLayer
from paramstore_client.moe.pipeline_plan import Pipeline, PipelineSearch
from paramstore_client.source import ExpertSource
from paramstore_testkit.training.parallel_job import Job
from paramstore_testkit.training.thread_ranks import of_all, run_ranks

FORWARD_S, BACKWARD_S, WORD_S = 100.0, 30.0, 1000.0
_mine = threading.local()
"""`now`: the time of each rank's thread."""


class Experts(torch.autograd.Function):
    """Takes its time either way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        _mine.now += FORWARD_S
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _mine.now += BACKWARD_S
        return grad.clone()


def _timed(exchange: FlatExchange) -> list[Times]:
    _mine.now = 0.0
    search, times = Search(PipelineSearch(most_parts=1, reuses=("keep", "S4"))), list[Times]()
    start_alike, end = exchange.start_alike, search.end

    def slow(sent: Tensor) -> Arriving:
        _mine.now += WORD_S
        return start_alike(sent)

    def noted(call: int, ended: Clock | None) -> None:
        assert ended is not None
        times.append(ended.times())
        end(call, ended)

    exchange.start_alike = slow  # type: ignore[method-assign]
    search.end = noted  # type: ignore[method-assign]
    resident = cast(ExpertSource, SimpleNamespace(lease_slots=0, prefetch=lambda keys: None))
    rows = ParallelLayer(exchange, Placement.in_order(8, 2), resident, 0, step=lambda: 0, pipeline=search)
    kernel = ParallelKernel(rows, experts=8, kernel="grouped_mm")
    x, ids, gates, grad = Job(tokens=(64,), experts=8, top_k=2).draw()
    for _ in range(3):
        y = kernel.run(x.clone().requires_grad_(), ids, gates, lambda hidden, *_, **__: Experts.apply(hidden), anchor=None)
        y.backward(grad)
    return times


def test_a_trials_calls_are_timed_by_what_is_done_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock.time, "perf_counter", lambda: _mine.now)
    for times in of_all(run_ranks(2, _timed)):
        plain, again = times  # of the first call nobody knew the rows before
        assert plain == Times(FORWARD_S + WORD_S, FORWARD_S, BACKWARD_S + WORD_S, BACKWARD_S)
        assert again == Times(FORWARD_S + WORD_S, FORWARD_S, FORWARD_S + BACKWARD_S + WORD_S, FORWARD_S + BACKWARD_S)


def test_a_call_whose_pipeline_is_given_tells_nothing() -> None:
    plan = FixedPlan(Pipeline(2))
    assert (plan.pipeline, plan.word, plan.telling(7)) == (Pipeline(2), 0, ())
