"""The formula of a layer's memory says what holds by construction, what was computed by hand, and what torch's allocator gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_bench.moe.memory_rank import changes_of
from paramstore_client.moe import Pipeline
from paramstore_client.moe.exchange import FlatExchange
from paramstore_client.moe.granularity.memory import RANDOM_BYTES, LayerSizes, held_bytes, host_bytes, peak_bytes
from paramstore_client.moe.host_arena import ROUND_BYTES
from paramstore_client.moe.pipeline_plan import REUSES, SPLITS
from paramstore_client.nn import StoredExperts
from paramstore_testkit.training.thread_ranks import ThreadParallel

SMALL = LayerSizes(tokens=4, rows_out=8, expert_rows=(4, 4), width=2, inner=3)
LARGE = LayerSizes(tokens=2048, rows_out=8192, expert_rows=(128,) * 64, width=1024, inner=2048, element_bytes=2)
WAYS = [Pipeline(parts=parts, split=split, reuse=reuse) for parts in (1, 2, 4) for split in SPLITS for reuse in REUSES]


def _ids(pipeline: Pipeline) -> str:
    return f"{pipeline.parts}-{pipeline.split}-{pipeline.reuse}"


def test_a_layer_in_one_part_takes_what_was_computed_by_hand() -> None:
    # a row has 8 bytes, 12 within an expert; gradients of an expert's weights have 72
    output, returned = 4 * 8, 8 * 8
    numbers, gates, kept = 8 * (4 * 8 + 2 * 8), 8 * 4, 8 * (8 + 4 * 12)
    assert held_bytes(SMALL, Pipeline()) == output + returned + numbers + gates + kept == 960
    one_expert, last_expert = 72 + 4 * 8, max(72 + 4 * (8 + 2 * 12), 24 + 4 * 4 * 12)
    backward = 8 * 8 + one_expert + last_expert
    assert peak_bytes(SMALL, Pipeline()) == output + numbers + gates + kept + backward == 1280


def test_a_layer_in_parts_takes_what_was_computed_by_hand() -> None:
    pipeline = Pipeline(parts=2, reuse="S4")
    random, numbers, gates, travelling = 2 * 5056, 8 * (5 * 8 + 2 * 8), 8 * 4, 2 * (4 + 4) * 8
    assert held_bytes(SMALL, pipeline) == (4 + 8) * 8 + numbers + gates + random
    rows, activations, last_expert = 2 * 4 * 8, 4 * 4 * 12, max(72 + 4 * (8 + 2 * 12), 24 + 4 * 4 * 12)
    backward = 8 * 8 + travelling + rows + activations + last_expert
    assert peak_bytes(SMALL, pipeline) == 4 * 8 + numbers + gates + random + backward


@pytest.mark.parametrize("pipeline", WAYS, ids=_ids)
def test_what_waits_elsewhere_is_not_held(pipeline: Pipeline) -> None:
    keep = replace(pipeline, reuse="keep")
    again = RANDOM_BYTES * pipeline.parts if pipeline.computes_again else 0
    gone = 0 if pipeline == keep else LARGE.rows_in * (LARGE.row_bytes + LARGE.activation_bytes) - again
    assert held_bytes(LARGE, keep) - held_bytes(LARGE, pipeline) == gone
    assert peak_bytes(LARGE, pipeline) > held_bytes(LARGE, pipeline)


def test_parts_without_rows_keep_nothing() -> None:
    more, as_many = (held_bytes(SMALL, Pipeline(parts=parts, reuse="S4")) for parts in (4, 2))
    assert more == as_many


def test_the_host_has_what_is_copied_and_no_more() -> None:
    for pipeline in WAYS:
        taken = {reuse: host_bytes(LARGE, replace(pipeline, reuse=reuse)) for reuse in REUSES}
        assert taken["keep"] == taken["S4"] == 0
        assert taken["S1"] == taken["S2"] + taken["S3"]
        rows_bytes, activation_bytes = LARGE.rows_in * LARGE.row_bytes, LARGE.rows_in * LARGE.activation_bytes
        assert rows_bytes <= taken["S3"] < 1.13 * rows_bytes
        assert activation_bytes <= taken["S2"] < 1.13 * activation_bytes


@pytest.mark.parametrize(("split", "buffers"), [("experts", 2 + 2 * 3), ("tokens", 4 + 4 * 2 * 3)])
def test_small_buffers_have_the_least_size(split: str, buffers: int) -> None:
    assert host_bytes(SMALL, Pipeline(parts=4, split=split, reuse="S1")) == buffers * ROUND_BYTES


@pytest.mark.parametrize("reuse", REUSES)
def test_more_parts_of_experts_need_no_more_memory_at_once(reuse: str) -> None:
    peaks = [peak_bytes(LARGE, Pipeline(parts=parts, reuse=reuse)) for parts in (1, 2, 4, 8, 16)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) > 3


@pytest.mark.parametrize("split", SPLITS)
def test_each_part_of_tokens_makes_all_gradients_of_weights(split: str) -> None:
    pipeline, gradients = Pipeline(parts=4, split=split, reuse="S1"), 3 * LARGE.matrix_bytes * (64 if split == "tokens" else 16)
    assert 1 < peak_bytes(LARGE, pipeline) / gradients < (1.2 if split == "tokens" else 1.8)


@pytest.mark.parametrize("reuse", REUSES)
def test_what_a_device_cannot_read_on_the_host_is_copied_back(reuse: str) -> None:
    pipeline = Pipeline(parts=4, reuse=reuse)
    more = peak_bytes(LARGE, pipeline) - peak_bytes(replace(LARGE, reads_host=True), pipeline)
    part = LARGE.rows_in // 4
    rows, activations = part * LARGE.row_bytes, part * LARGE.activation_bytes
    assert more == {"keep": 0, "S1": rows + activations, "S2": activations, "S3": rows, "S4": 0}[reuse]


def test_an_expert_with_many_rows_makes_a_large_part() -> None:
    hot, pipeline = replace(LARGE, expert_rows=(0,) * 40 + (4096,) * 2 + (0,) * 22), Pipeline(parts=4, reuse="S4")
    assert held_bytes(LARGE, pipeline) - held_bytes(hot, pipeline) == 3 * RANDOM_BYTES  # of parts without rows
    rows = hot.rows_in * (2 * hot.row_bytes + hot.activation_bytes)
    assert peak_bytes(hot, pipeline) > rows > peak_bytes(hot, Pipeline(parts=4, split="tokens", reuse="S4"))


@pytest.mark.parametrize("expert_rows", [(), (0, 0), (1, 0, 2)])
def test_a_rank_with_few_rows_or_none_has_a_size(expert_rows: tuple[int, ...]) -> None:
    few = LayerSizes(tokens=0, rows_out=0, expert_rows=expert_rows, width=8, inner=8)
    for pipeline in WAYS:
        assert peak_bytes(few, pipeline) >= held_bytes(few, pipeline) >= 0
        assert (host_bytes(few, pipeline) > 0) == (few.rows_in > 0 and pipeline.reuse in ("S1", "S2", "S3"))


class _Alone:
    """A group of one rank: what it sends, it has received, in the thread that is measured."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def alltoall_base(self, received: Tensor, sent: Tensor, *_: Any) -> _Alone:
        received.copy_(sent)
        return self

    def wait(self, _: Any) -> None:
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pipeline", [way for way in WAYS if way.parts == 4 or way.is_plain], ids=_ids)
def test_a_layer_takes_what_the_formula_says(pipeline: Pipeline) -> None:
    experts, tokens, top_k, width, inner = 6, 96, 2, 48, 80
    namespace = MemoryNamespace.of_swiglu(layers=1, experts=experts, hidden=width, inner=inner)
    parallel = ThreadParallel(FlatExchange(_Alone(), _Alone(), None, timeout_s=1.0, lost=lambda: None), pipeline=pipeline)
    layer = StoredExperts(namespace, 0, parallel=parallel)
    drawn = torch.Generator().manual_seed(0)
    x, gates, grad = (torch.randn(tokens, size, generator=drawn, requires_grad=size != 1) for size in (width, top_k, 1))
    ids = torch.rand(tokens, experts, generator=drawn).topk(top_k)[1]

    def step() -> None:
        torch.autograd.backward(layer(x, ids, gates), grad.expand(-1, width))

    step()  # makes what stays: groups, the arena, and the sums to which gradients are added
    x.grad = gates.grad = None
    counts = tuple(ids.flatten().bincount(minlength=experts).tolist())
    sizes = LayerSizes(tokens, tokens * top_k, counts, width, inner, reads_host=True)
    assert changes_of(lambda: layer(x, ids, gates))[-1] == pytest.approx(held_bytes(sizes, pipeline), rel=0.10)
    assert max(changes_of(step)) == pytest.approx(peak_bytes(sizes, pipeline), rel=0.10)
    assert parallel.arena.size_bytes == pytest.approx(host_bytes(sizes, pipeline), rel=0.10)
