"""A layer in parts is the layer, bit for bit, whatever is kept for backward; what one rank fails at in any part, all learn."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from paramstore.errors import CapacityError, ConfigError, ParamStoreError, StepMismatch
from paramstore_client.moe import Pipeline
from paramstore_client.moe.exchange import FlatExchange
from paramstore_client.nn import StoredExperts, swiglu
from paramstore_testkit.training.parallel_job import Computed, Job
from paramstore_testkit.training.thread_ranks import ThreadParallel, of_all, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

JOBS = [
    Job(),
    Job(dtype=torch.bfloat16),
    Job(tokens=(7, 3), experts=8, top_k=2),
    Job(tokens=(4, 6, 5), experts=8, top_k=1, lease_slots=8),
    Job(tokens=(3, 4, 0, 2, 6), experts=3, top_k=2),
    Job(tokens=(0, 0, 0), experts=4, top_k=2),
    Job(tokens=(20, 30), experts=700, top_k=4, lease_slots=40),
]
BY_EXPERTS = [Pipeline(parts=parts, reuse=reuse) for parts in (1, 2, 4) for reuse in ("keep", "S1", "S2", "S3", "S4")][1:]


def _ids(pipeline: Pipeline) -> str:
    return f"{pipeline.parts}-{pipeline.split}-{pipeline.reuse}"


@pytest.mark.parametrize("pipeline", BY_EXPERTS, ids=_ids)
@pytest.mark.parametrize("job", JOBS[:2], ids=str)
def test_parts_of_experts_compute_what_one_process_computes(job: Job, pipeline: Pipeline) -> None:
    Computed.by_ranks(job, pipeline=pipeline).check_equal(Computed.of(job, job.namespace()))


@pytest.mark.parametrize("pipeline", [Pipeline(parts=3, reuse="S2"), Pipeline(parts=5)], ids=_ids)
@pytest.mark.parametrize("job", JOBS[2:], ids=str)
def test_tokens_of_any_number_pass_in_parts(job: Job, pipeline: Pipeline) -> None:
    Computed.by_ranks(job, pipeline=pipeline).check_equal(Computed.of(job, job.namespace()))


@pytest.mark.parametrize("reuse", ["keep", "S1", "S2", "S3", "S4"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_parts_of_tokens_move_gradients_of_weights_by_rounding_alone(dtype: torch.dtype, tolerance: float, reuse: str) -> None:
    job = Job(tokens=(64, 0, 80, 48), experts=4, top_k=2, dtype=dtype, width=64, inner=32)
    pipeline = Pipeline(parts=3, split="tokens", reuse=reuse)
    computed, alone = Computed.by_ranks(job, pipeline=pipeline), Computed.of(job, job.namespace())
    for key, fields in computed.pending.items():
        for name, gradient in fields.items():
            wanted = alone.pending[key][name]
            assert (gradient - wanted).norm() <= tolerance * wanted.norm(), (key, name)
    computed.pending = alone.pending
    computed.check_equal(alone)  # rows are whole vectors: a product's rows do not depend on their number


@pytest.mark.parametrize("reuse", ["keep", "S1", "S4"])
def test_a_graph_that_stays_is_passed_back_again(reuse: str) -> None:
    job = Job(tokens=(5, 4))

    def rank(exchange: FlatExchange) -> None:
        x, ids, gates, grad = (drawn[job.parts[exchange.rank]] for drawn in job.draw())
        x = x.clone().requires_grad_()
        parallel = ThreadParallel(exchange, pipeline=Pipeline(parts=2, reuse=reuse))
        y = StoredExperts(job.namespace(), 0, parallel=parallel)(x, ids, gates)
        y.backward(grad, retain_graph=True)
        first, x.grad = x.grad, None
        y.backward(grad)
        assert first is not None
        assert torch.equal(first, x.grad)
        with pytest.raises(RuntimeError, match="second time"):
            y.backward(grad)

    of_all(run_ranks(2, rank))


def test_experts_under_autocast_are_computed_again_as_they_were() -> None:
    job = Job()

    def compute(exchange: FlatExchange, pipeline: Pipeline) -> Tensor:
        x, ids, gates, grad = (drawn[job.parts[exchange.rank]] for drawn in job.draw())
        x = x.clone().requires_grad_()
        layer = StoredExperts(job.namespace(), 0, parallel=ThreadParallel(exchange, pipeline=pipeline))
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x, ids, gates)
        y.backward(grad)  # outside of it, as it is done
        assert x.grad is not None
        return x.grad

    def rank(exchange: FlatExchange) -> None:
        assert torch.equal(compute(exchange, Pipeline(parts=2, reuse="S4")), compute(exchange, Pipeline(parts=2)))

    of_all(run_ranks(len(job.tokens), rank))


def test_hooks_for_saved_tensors_around_the_layer_get_all_that_is_kept() -> None:
    job = Job(tokens=(5, 4))

    def rank(exchange: FlatExchange) -> int:
        parallel, packed = ThreadParallel(exchange, pipeline=Pipeline(parts=2, reuse="S1")), []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            computed = Computed.of(job, job.namespace(), job.parts[exchange.rank], parallel)
        assert parallel.arena.size_bytes == 0
        Computed.of(job, job.namespace(), job.parts[exchange.rank], ThreadParallel(exchange)).check_equal(computed)
        return sum(packed)

    rows = sum(job.tokens) * job.top_k
    assert sum(of_all(run_ranks(2, rank))) >= rows * (job.width + 4 * job.inner), "rows and activations"


# --- memory


@pytest.mark.parametrize("reuse", ["keep", "S1", "S4"])
def test_a_graph_that_is_dropped_frees_what_was_kept(reuse: str) -> None:
    job = Job(tokens=(5, 4))

    def rank(exchange: FlatExchange) -> None:
        seen: list[weakref.ref[Any]] = []

        def expert(x: Tensor, weights: Any) -> Tensor:
            hidden = torch.nn.functional.linear(x, weights["gate_up"][:10])
            seen.append(weakref.ref(hidden.untyped_storage()))
            return torch.nn.functional.linear(hidden.sigmoid(), weights["down"])

        x, ids, gates, _ = (drawn[job.parts[exchange.rank]] for drawn in job.draw())
        parallel = ThreadParallel(exchange, pipeline=Pipeline(parts=2, reuse=reuse))
        layer = StoredExperts(job.namespace(), 0, expert, parallel=parallel)
        y = layer(x.clone().requires_grad_(), ids, gates)
        held_bytes = parallel.arena.size_bytes
        assert (held_bytes > 0) == (reuse == "S1")
        del y
        assert not any(storage() is not None for storage in seen), "dropped without the collector"
        layer(x.clone().requires_grad_(), ids, gates)
        assert parallel.arena.size_bytes == held_bytes, "the same buffers again"

    gc.disable()
    try:
        of_all(run_ranks(2, rank))
    finally:
        gc.enable()


def test_a_full_arena_is_told_to_all_ranks_with_its_size() -> None:
    job = Job(tokens=(5, 4))

    def rank(exchange: FlatExchange) -> str:
        limit = 1 << (30 if exchange.rank == 0 else 16)
        parallel = ThreadParallel(exchange, pipeline=Pipeline(parts=2, reuse="S1", host_bytes=limit))
        with pytest.raises(CapacityError) as raised:
            Computed.of(job, job.namespace(), job.parts[exchange.rank], parallel)
        return str(raised.value)

    first, second = of_all(run_ranks(2, rank))
    assert "the limit is 65536" in second
    assert first == f"rank 1: {second}"


# --- what goes wrong


@pytest.mark.parametrize("reuse", ["keep", "S4"])
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("number", [0, 1])
def test_what_one_rank_cannot_do_in_a_part_all_raise_and_are_in_step_after_it(number: int, when: str, reuse: str) -> None:
    job = Job(tokens=(5, 4, 6))

    class Cursed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, curse: Any) -> Tensor:
            ctx.curse = curse
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            ctx.curse("backward")
            return grad, None

    def rank(exchange: FlatExchange) -> str:
        calls = {"forward": 0, "backward": 0}

        def curse(now: str) -> None:
            calls[now] += 1
            if exchange.rank == 1 and now == when and calls[now] == number + 1:
                raise MemoryError("of the kernel")

        def expert(x: Tensor, weights: Any) -> Tensor:
            curse("forward")
            return swiglu(Cursed.apply(x, curse), weights)  # type: ignore[no-untyped-call]

        namespace, parallel = job.namespace(), ThreadParallel(exchange, pipeline=Pipeline(parts=2, reuse=reuse))
        with pytest.raises((ParamStoreError, MemoryError)) as raised:
            Computed.of(job, namespace, job.parts[exchange.rank], parallel, expert_fn=expert)
        assert not namespace.leased
        namespace.pending.clear()
        Computed.of(job, namespace, job.parts[exchange.rank], parallel)
        return str(raised.value)

    told = "rank 1: MemoryError: of the kernel"
    assert of_all(run_ranks(3, rank)) == [told, "of the kernel", told]


@pytest.mark.parametrize(
    ("other", "field"),
    [(Pipeline(parts=3), "parts"), (Pipeline(parts=2, split="tokens"), "split"), (Pipeline(parts=2, reuse="S2"), "reuse")],
    ids=["parts", "split", "reuse"],
)
def test_ranks_with_other_pipelines_are_named_before_a_row_is_sent(other: Pipeline, field: str) -> None:
    job = Job(tokens=(5, 4))

    def rank(exchange: FlatExchange) -> int:
        parallel = ThreadParallel(exchange, pipeline=other if exchange.rank else Pipeline(parts=2))
        with pytest.raises(StepMismatch, match=rf"differ in {field}: .* on rank 0; .* on rank 1"):
            Computed.of(job, job.namespace(), job.parts[exchange.rank], parallel)
        return exchange.sent_bytes

    assert of_all(run_ranks(2, rank)) == [0, 0]


def test_experts_that_are_not_the_same_the_second_time_are_refused() -> None:
    job = Job(tokens=(5, 4))

    def rank(exchange: FlatExchange) -> None:
        is_second = False

        def expert(x: Tensor, weights: Any) -> Tensor:
            return swiglu(x, weights).sigmoid() if is_second else swiglu(x, weights)

        x, ids, gates, grad = (drawn[job.parts[exchange.rank]] for drawn in job.draw())
        parallel = ThreadParallel(exchange, pipeline=Pipeline(reuse="S4"))
        y = StoredExperts(job.namespace(), 0, expert, parallel=parallel)(x.clone().requires_grad_(), ids, gates)
        is_second = True
        with pytest.raises(ConfigError, match="computed again: let them do the same"):
            y.backward(grad)

    of_all(run_ranks(2, rank))


def test_ranks_that_fail_at_different_rows_exchange_none_after_it() -> None:
    """They would be rows of another call, or end the process where lengths differ."""
    job = Job(tokens=(9, 8))

    def rank(exchange: FlatExchange) -> list[str]:
        parallel, said = ThreadParallel(exchange, pipeline=Pipeline(parts=2)), []
        start_rows, started = exchange.start_rows, [0]

        def failing(*arguments: Any, **options: Any) -> Any:
            started[0] += 1
            if started[0] == 2 + exchange.rank:
                raise MemoryError("for rows")
            return start_rows(*arguments, **options)

        exchange.start_rows = failing  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises((ParamStoreError, MemoryError)) as raised:
                Computed.of(job, job.namespace(), job.parts[exchange.rank], parallel)
            said.append(type(raised.value).__name__)
        return said

    assert of_all(run_ranks(2, rank, timeout_s=2.0)) == [["MemoryError", "RankLost"]] * 2


def test_what_failed_is_not_kept() -> None:
    job = Job(tokens=(5, 4))

    def rank(exchange: FlatExchange) -> None:
        seen: list[weakref.ref[Any]] = []

        def expert(x: Tensor, weights: Any) -> Tensor:
            hidden = swiglu(x, weights)
            seen.append(weakref.ref(hidden))
            raise MemoryError("of the kernel")

        parallel = ThreadParallel(exchange, pipeline=Pipeline(parts=2, reuse="S1"))
        with suppress(MemoryError, ParamStoreError):
            Computed.of(job, job.namespace(), job.parts[exchange.rank], parallel, expert_fn=expert)
        assert seen
        assert not any(tensor() is not None for tensor in seen), "without the collector"

    gc.disable()
    try:
        of_all(run_ranks(2, rank))
    finally:
        gc.enable()


def test_tokens_may_be_changed_in_place_behind_the_layer() -> None:
    job = Job(tokens=(5, 4))

    def rank(exchange: FlatExchange) -> None:
        x, ids, gates, grad = (drawn[job.parts[exchange.rank]] for drawn in job.draw())
        parallel = ThreadParallel(exchange, pipeline=Pipeline(parts=2, reuse="S1"))
        stream = x.clone().requires_grad_() * 1
        stream += StoredExperts(job.namespace(), 0, parallel=parallel)(stream, ids, gates)
        stream.backward(grad)

    of_all(run_ranks(2, rank))


def test_what_the_anchor_raises_all_ranks_raise_and_are_in_step_after_it() -> None:
    job = Job(tokens=(5, 4))

    def rank(exchange: FlatExchange) -> str:
        x, ids, gates, _ = (drawn[job.parts[exchange.rank]] for drawn in job.draw())
        layer = StoredExperts(job.namespace(), 0, parallel=ThreadParallel(exchange, pipeline=Pipeline(parts=2)))

        def anchor() -> Tensor:
            raise CapacityError("no apply can begin")

        layer.anchor = anchor if exchange.rank == 1 else None
        with pytest.raises(CapacityError) as raised:
            layer(x, ids, gates)
        layer.anchor = None
        layer(x, ids, gates)
        return str(raised.value)

    assert of_all(run_ranks(2, rank)) == ["rank 1: no apply can begin", "no apply can begin"]
