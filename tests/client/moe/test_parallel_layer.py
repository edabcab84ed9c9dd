"""A layer whose experts are spread over ranks is that of one process, bit for bit; what one rank fails at, all learn."""

from __future__ import annotations

import copy
import dataclasses
import random
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paramstore.core.placement import Placement
from paramstore.errors import CapacityError, ConfigError, ParamStoreError, StepMismatch
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.moe.balance.replicas import Replicas
from paramstore_client.moe.exchange import FlatExchange
from paramstore_client.moe.pipeline_plan import Pipeline
from paramstore_client.nn import StoredExperts, swiglu
from paramstore_testkit.training.parallel_job import Computed, Job, train
from paramstore_testkit.training.thread_ranks import ThreadParallel, of_all, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

JOBS = [
    Job(),
    Job(dtype=torch.bfloat16),
    Job(tokens=(7, 3), experts=8, top_k=2),
    Job(tokens=(4, 6, 5), experts=8, top_k=1),
    Job(tokens=(3, 4, 0, 2, 6), experts=3, top_k=2, lease_slots=8),
    Job(tokens=(0, 0, 0), experts=4, top_k=2),
    Job(tokens=(1, 0, 0, 0)),
    Job(tokens=(40, 30), experts=700, top_k=4, lease_slots=40),
]
PIPELINES = {
    "whole": Pipeline(), "parts": Pipeline(3), "S1": Pipeline(2, reuse="S1"), "S3": Pipeline(2, reuse="S3"),
    "S4": Pipeline(2, reuse="S4"),
}  # fmt: skip
in_each_pipeline = pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_ranks_compute_what_one_process_computes(job: Job) -> None:
    Computed.by_ranks(job).check_equal(Computed.of(job, job.namespace()))


@pytest.mark.parametrize("seed", range(3))
def test_any_placement_computes_the_same(seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    job = Job(seed=seed)
    ranks = torch.randint(len(job.tokens), (job.experts,), generator=drawn).tolist()
    placement = Placement(tuple((rank,) for rank in ranks), len(job.tokens))
    Computed.by_ranks(job, placement).check_equal(Computed.of(job, job.namespace()))


@pytest.mark.parametrize("pipeline", [Pipeline(), Pipeline(2), Pipeline(2, split="tokens")], ids=["whole", "experts", "tokens"])
@pytest.mark.parametrize("seed", range(3))
def test_replicas_compute_the_same_but_for_rounding(seed: int, pipeline: Pipeline) -> None:
    """An expert multiplies fewer rows at once on each of its ranks, and its gradient is a sum of theirs."""
    drawn, job = random.Random(seed), Job(seed=seed)
    ranks = range(len(job.tokens))
    placement = Placement(tuple(tuple(sorted(drawn.sample(ranks, drawn.randint(1, 4)))) for _ in range(job.experts)), len(ranks))

    def rank(exchange: FlatExchange) -> Computed:
        return Computed.of(job, job.namespace(), job.parts[exchange.rank], ThreadParallel(exchange, placement, pipeline))

    found, alone = of_all(run_ranks(len(ranks), rank)), Computed.of(job, job.namespace())
    for name in ("y", "grad_x", "grad_gate"):
        torch.testing.assert_close(torch.cat([getattr(mine, name) for mine in found]), getattr(alone, name), rtol=1e-5, atol=1e-6)
    for key, fields in alone.pending.items():
        pushed = [mine.pending[key] for mine in found if key in mine.pending]
        for name, gradient in fields.items():
            summed = reduce(torch.add, [each[name] for each in pushed])
            assert (summed - gradient).norm() <= 1e-6 * gradient.norm(), (key, name)
    assert {key for mine in found for key in mine.pending} == alone.pending.keys()
    assert max(sum(key in mine.pending for mine in found) for key in alone.pending) > 1, "some expert had rows on several ranks"
    for number, mine in enumerate(found):
        assert {expert for _, expert in mine.pending} <= set(placement.of_rank(number))


@pytest.mark.parametrize("failing", ["before", "after"])
def test_what_a_rank_cannot_do_with_replicas_all_raise_and_are_in_step_after_it(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before ranks tell how many rows they have for experts with replicas, or after that."""
    job = Job(tokens=(5, 4, 6))
    placement = Placement(((0, 1, 2),) * job.experts, 3)
    split = Replicas.split
    left = [failing == "after"]

    def fail_once(self: Replicas, *arguments: Any, rank: int) -> Tensor:
        if rank == 1 and left.pop():
            raise CapacityError("no room")
        return split(self, *arguments, rank=rank)

    def rank(exchange: FlatExchange) -> str:
        x, ids, gates, _ = (drawn[job.parts[exchange.rank]] for drawn in job.draw())
        x = x.int() if exchange.rank == 1 and failing == "before" else x
        parallel = ThreadParallel(exchange, placement)
        with pytest.raises(ParamStoreError) as raised:
            StoredExperts(job.namespace(), 0, parallel=parallel)(x, ids, gates)
        left.append(False)
        Computed.of(job, job.namespace(), job.parts[exchange.rank], parallel)
        return str(raised.value)

    with monkeypatch.context() as patch:
        patch.setattr(Replicas, "split", fail_once)
        said = of_all(run_ranks(3, rank))
    assert said[0] == said[2] == f"rank 1: {said[1]}"


def test_all_tokens_may_choose_one_expert() -> None:
    job = Job(top_k=1)

    class One(Job):
        def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            x, ids, gates, grad = Job.draw(self)
            return x, torch.full_like(ids, 6), gates, grad

    one = One(**dataclasses.asdict(job))
    computed = Computed.by_ranks(one)
    assert computed.pending.keys() == {(0, 6)}
    computed.check_equal(Computed.of(one, one.namespace()))


@in_each_pipeline
def test_weights_after_twenty_exact_steps_are_those_of_one_process(pipeline: Pipeline) -> None:
    job = Job()
    alone = job.namespace()
    train(job, alone, 20, lambda now: Computed.of(now, alone))
    namespaces = [job.namespace() for _ in job.tokens]

    def rank(exchange: FlatExchange) -> None:
        mine, parallel = namespaces[exchange.rank], ThreadParallel(exchange, pipeline=pipeline)
        train(job, mine, 20, lambda now: Computed.of(now, mine, now.parts[exchange.rank], parallel))

    of_all(run_ranks(len(job.tokens), rank))
    placement = Placement.in_order(job.experts, len(job.tokens))
    for layer, expert in alone.space:
        (owner,) = placement.ranks[expert]
        for name, value in namespaces[owner].values((layer, expert)).items():
            assert torch.equal(value, alone.values((layer, expert))[name]), (expert, name)


@in_each_pipeline
def test_a_forward_without_a_graph_computes_the_same(pipeline: Pipeline) -> None:
    job = Job()
    x, ids, gates, _ = job.draw()

    @torch.no_grad()
    def forward(namespace: MemoryNamespace, tokens: slice = slice(None), parallel: ThreadParallel | None = None) -> Tensor:
        return StoredExperts(namespace, 0, parallel=parallel)(x[tokens], ids[tokens], gates[tokens])

    def rank(exchange: FlatExchange) -> Tensor:
        return forward(job.namespace(), job.parts[exchange.rank], ThreadParallel(exchange, pipeline=pipeline))

    assert torch.equal(torch.cat(of_all(run_ranks(len(job.tokens), rank))), forward(job.namespace()))


@pytest.mark.parametrize("gates_of", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_under_autocast_compute_the_same(gates_of: torch.dtype) -> None:
    job = Job()
    x, ids, gates, _ = job.draw()
    gates = gates.to(gates_of)

    def forward(namespace: MemoryNamespace, tokens: slice = slice(None), parallel: ThreadParallel | None = None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return StoredExperts(namespace, 0, parallel=parallel)(x[tokens], ids[tokens], gates[tokens]).detach()

    def rank(exchange: FlatExchange) -> Tensor:
        return forward(job.namespace(), job.parts[exchange.rank], ThreadParallel(exchange))

    assert torch.equal(torch.cat(of_all(run_ranks(len(job.tokens), rank))), forward(job.namespace()))


@in_each_pipeline
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_the_layer_repeats_its_exchanges(use_reentrant: bool, pipeline: Pipeline) -> None:
    job = Job()

    def compute(namespace: MemoryNamespace, tokens: slice = slice(None), parallel: ThreadParallel | None = None) -> Tensor:
        x, ids, gates, grad = (drawn[tokens] for drawn in job.draw())
        x = x.clone().requires_grad_()
        layer = StoredExperts(namespace, 0, parallel=parallel)
        y = checkpoint(layer, x, ids, gates, use_reentrant=use_reentrant)
        y.backward(grad)
        assert x.grad is not None
        return x.grad

    def rank(exchange: FlatExchange) -> Tensor:
        return compute(job.namespace(), job.parts[exchange.rank], ThreadParallel(exchange, pipeline=pipeline))

    assert torch.equal(torch.cat(of_all(run_ranks(len(job.tokens), rank))), compute(job.namespace()))


def test_inputs_that_are_frozen_on_one_rank_alone_keep_nobody_waiting() -> None:
    job = Job(tokens=(5, 4, 6))

    def rank(exchange: FlatExchange) -> None:
        x, ids, gates, grad = (drawn[job.parts[exchange.rank]] for drawn in job.draw())
        if exchange.rank != 1:
            x, gates = x.clone().requires_grad_(), gates.clone().requires_grad_()
        StoredExperts(job.namespace(), 0, parallel=ThreadParallel(exchange))(x, ids, gates).backward(grad)
        assert (x.grad is None) == (exchange.rank == 1)

    of_all(run_ranks(3, rank))


def test_only_rows_for_other_ranks_are_counted_as_sent() -> None:
    job = Job(tokens=(4, 4), experts=4, top_k=2)
    x, ids, gates, _ = job.draw()

    @torch.no_grad()
    def rank(exchange: FlatExchange) -> int:
        mine = job.parts[exchange.rank]
        StoredExperts(job.namespace(), 0, parallel=ThreadParallel(exchange))(x[mine], ids[mine], gates[mine])
        return exchange.sent_bytes

    sent = of_all(run_ranks(2, rank))
    crossing = [int((ids[job.parts[0]] >= 2).sum()), int((ids[job.parts[1]] < 2).sum())]
    row_bytes = x[:1].nbytes
    assert sum(sent) == 2 * sum(crossing) * row_bytes, "each there and back"


# --- what goes wrong


class Failing(MemoryNamespace):
    """A namespace in which one call raises."""

    fails = ""

    def acquire(self, *arguments: Any, **options: Any) -> Any:
        if self.fails == "acquire":
            raise CapacityError("17 slots are too few")
        return super().acquire(*arguments, **options)

    def push(self, gradients: Any) -> Any:
        if self.fails == "push":
            raise CapacityError("17 bytes are too few")
        return super().push(gradients)


@pytest.mark.parametrize("call", ["acquire", "push"])
def test_what_one_rank_cannot_do_all_raise_and_are_in_step_after_it(call: str) -> None:
    job = Job(tokens=(5, 4, 6))

    def rank(exchange: FlatExchange) -> str:
        namespace = job.namespace()
        namespace.__class__ = Failing
        parallel = ThreadParallel(exchange)
        namespace.fails = call if exchange.rank == 1 else ""
        with pytest.raises(CapacityError) as raised:
            Computed.of(job, namespace, job.parts[exchange.rank], parallel)
        namespace.fails = ""
        assert not namespace.leased
        namespace.pending.clear()
        Computed.of(job, namespace, job.parts[exchange.rank], parallel)
        return str(raised.value)

    said = of_all(run_ranks(3, rank))
    assert said[1].startswith("17 ")
    assert said[0] == said[2] == f"rank 1: {said[1]}"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"expert_ids": lambda ids: ids + 14}, "the layer has experts 0 to 15"),
        ({"expert_ids": lambda ids: ids - 99}, "the layer has experts 0 to 15"),
        ({"expert_ids": lambda ids: ids.float()}, "give integers"),
        ({"gate": lambda gates: gates[:-1]}, "twice"),
        ({"x": lambda x: x[None]}, "give .tokens, width."),
        ({"x": lambda x: x.int()}, "expert-parallel rows of torch.int32"),
    ],
    ids=["above", "below", "fractions", "gates of others", "one dimension more", "whole numbers"],
)
def test_what_no_router_gives_is_refused_on_all_ranks(damage: dict[str, Any], says: str) -> None:
    job = Job(tokens=(5, 4, 6))

    def rank(exchange: FlatExchange) -> None:
        given = dict(zip(("x", "expert_ids", "gate"), (drawn[job.parts[exchange.rank]] for drawn in job.draw()), strict=False))
        if exchange.rank == 2:
            given |= {name: change(given[name]) for name, change in damage.items()}
        parallel = ThreadParallel(exchange)
        with pytest.raises(ConfigError, match=says):
            StoredExperts(job.namespace(), 0, parallel=parallel)(*given.values())
        Computed.of(job, job.namespace(), job.parts[exchange.rank], parallel)  # all are in step

    of_all(run_ranks(3, rank))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("dtype", {"dtype": torch.bfloat16}), ("top_k", {"top_k": 2}), ("experts", {"experts": 15}),
    ],
)  # fmt: skip
def test_ranks_that_differ_are_named_before_a_row_is_sent(field: str, change: dict[str, Any]) -> None:
    job = Job(tokens=(5, 4, 6))

    def rank(exchange: FlatExchange) -> int:
        mine = dataclasses.replace(job, **change) if exchange.rank == 1 else job
        with pytest.raises(StepMismatch, match=rf"differ in {field}: .* on ranks 0, 2; .* on rank 1"):
            Computed.of(mine, mine.namespace(), mine.parts[exchange.rank], ThreadParallel(exchange))
        return exchange.sent_bytes

    assert of_all(run_ranks(3, rank)) == [0, 0, 0]


def test_a_rank_that_records_no_graph_among_others_that_do_is_named() -> None:
    job = Job(tokens=(5, 4))

    def rank(exchange: FlatExchange) -> None:
        x, ids, gates, _ = (drawn[job.parts[exchange.rank]] for drawn in job.draw())
        with torch.set_grad_enabled(exchange.rank == 0), pytest.raises(StepMismatch, match="records: 1 on rank 0; 0 on rank 1"):
            StoredExperts(job.namespace(), 0, parallel=ThreadParallel(exchange))(x, ids, gates)

    of_all(run_ranks(2, rank))


def test_backwards_in_another_order_are_refused_and_a_forward_beside_a_backward_too() -> None:
    job = Job(tokens=(5, 4))

    def forward(namespace: MemoryNamespace, exchange: FlatExchange, parallel: ThreadParallel) -> Tensor:
        x, ids, gates, _ = (drawn[job.parts[exchange.rank]] for drawn in job.draw())
        return StoredExperts(namespace, 0, parallel=parallel)(x.clone().requires_grad_(), ids, gates).sum()

    def rank(exchange: FlatExchange) -> list[str]:
        namespace, parallel, said = job.namespace(), ThreadParallel(exchange), []
        first, second = (forward(namespace, exchange, parallel) for _ in range(2))
        with pytest.raises(StepMismatch) as raised:
            (first if exchange.rank == 0 else second).backward(retain_graph=True)
        said.append(str(raised.value))
        with pytest.raises(StepMismatch) as raised:
            first.backward() if exchange.rank == 0 else forward(namespace, exchange, parallel)
        return [*said, str(raised.value)]

    for said in of_all(run_ranks(2, rank)):
        assert "differ in call: 0 on rank 0; 1 on rank 1" in said[0]
        assert "differ in phase: backward on rank 0; forward on rank 1" in said[1]


def test_what_a_backward_raises_by_itself_the_others_notice_at_their_next_exchange() -> None:
    """Nothing is sent that one rank expects to be something else: a process would be ended by it."""
    job = Job(tokens=(5, 4, 6))

    class Cursed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise MemoryError("of the kernel")

    def rank(exchange: FlatExchange) -> str:
        def expert(x: Tensor, weights: Any) -> Tensor:
            return swiglu(Cursed.apply(x) if exchange.rank == 1 else x, weights)  # type: ignore[no-untyped-call]

        with pytest.raises((ParamStoreError, MemoryError)) as raised:
            Computed.of(job, job.namespace(), job.parts[exchange.rank], ThreadParallel(exchange), expert_fn=expert)
        return str(raised.value)

    said = of_all(run_ranks(3, rank))
    assert said == ["rank 1: MemoryError: of the kernel", "of the kernel", "rank 1: MemoryError: of the kernel"]


@in_each_pipeline
def test_a_second_derivative_is_refused_on_all_ranks(pipeline: Pipeline) -> None:
    job = Job(tokens=(5, 4))

    def rank(exchange: FlatExchange) -> None:
        x, ids, gates, _ = (drawn[job.parts[exchange.rank]] for drawn in job.draw())
        layer = StoredExperts(job.namespace(), 0, parallel=ThreadParallel(exchange, pipeline=pipeline))
        y = layer(x.clone().requires_grad_(), ids, gates)
        with pytest.raises(ConfigError, match="create_graph=True"):
            y.sum().backward(create_graph=True)

    of_all(run_ranks(2, rank))


def test_rows_in_a_longer_dtype_than_the_tokens_are_refused() -> None:
    job = Job(tokens=(5, 4), dtype=torch.bfloat16)

    def rank(exchange: FlatExchange) -> None:
        with pytest.raises(ConfigError, match="no longer dtype"):
            Computed.of(
                job, job.namespace(), job.parts[exchange.rank], ThreadParallel(exchange),
                expert_fn=lambda x, weights: swiglu(x, weights).float(),
            )  # fmt: skip

    of_all(run_ranks(2, rank))


def test_a_copy_of_the_module_shares_the_exchange() -> None:
    def rank(exchange: FlatExchange) -> None:
        layer = StoredExperts(Job().namespace(), 0, parallel=ThreadParallel(exchange))
        assert copy.deepcopy(layer._parallel) is layer._parallel

    of_all(run_ranks(2, rank))


def test_experts_that_change_the_width_are_refused() -> None:
    job = Job(tokens=(5, 4))

    def rank(exchange: FlatExchange) -> str:
        with pytest.raises(ConfigError) as raised:
            Computed.of(
                job, job.namespace(), job.parts[exchange.rank], ThreadParallel(exchange), expert_fn=lambda x, weights: x[:, :3]
            )
        return str(raised.value)

    assert all("of the same width" in said for said in of_all(run_ranks(2, rank)))


def test_rows_that_are_not_numbers_travel_as_they_are() -> None:
    job = Job(tokens=(5, 4))
    x, ids, gates, _ = job.draw()
    x[2, 1] = torch.nan

    def rank(exchange: FlatExchange) -> Tensor:
        mine = job.parts[exchange.rank]
        return StoredExperts(job.namespace(), 0, parallel=ThreadParallel(exchange))(x[mine], ids[mine], gates[mine]).detach()

    y = torch.cat(of_all(run_ranks(2, rank)))
    assert y.isnan().any(dim=1).tolist() == [token == 2 for token in range(9)]
