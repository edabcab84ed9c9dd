"""Sets our layer beside another one, turn by turn: the same tokens and weights, forward and backward, equal results or none.

- *Equal*: the output, and the gradients of tokens, gates and weights, differ by less than ROUNDING of the largest.
- The rows that ours sends to other ranks are as many bytes as the routing says, or the run ends.
"""

from __future__ import annotations

import time
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from paramstore.bench.pairs import Sample, sample_pairs
from paramstore.errors import StepMismatch
from paramstore_bench.moe.found import Compared, check_equal, check_sent
from paramstore_bench.moe.layers import FixedCapacity, Layer, Ours, Transformers, experts_of
from paramstore_bench.moe.meeting import greatest, seconds_of, sums
from paramstore_bench.moe.sizes import RANKS, Batch, Sizes
from paramstore_client.moe import PipelineSearch
from paramstore_client.moe.exchange import FlatExchange
from paramstore_client.moe.granularity.search import Search

NAMES = ("y", "gradients of tokens", "gradients of gates", "gradients of weights")
EXCHANGE_S = 60.0
MOST_CALLS = 60
"""Calls within which a search ends."""


def beside_transformers(sizes: Sizes, *, is_bare: bool) -> Compared:
    """Compares our layer with the all-to-all of transformers."""
    exchange, module = joined(), experts_of(sizes, own_experts(sizes, dist.get_rank()))
    return compared(sizes, Ours(sizes, module, exchange), Transformers(sizes, module, is_bare=is_bare), exchange)


def beside_fixed_capacity(sizes: Sizes) -> Compared:
    """Compares our layer with an all-to-all of the least capacity that drops nothing."""
    exchange, module = joined(), experts_of(sizes, own_experts(sizes, dist.get_rank()))
    loads = torch.bincount(Batch.draw(sizes, rank=dist.get_rank(), number=0).ids.flatten(), minlength=sizes.experts)
    fixed = FixedCapacity(sizes, module, capacity=round(greatest(float(loads.max()))))
    found = compared(sizes, Ours(sizes, module, exchange), fixed, exchange)
    even = sizes.tokens * sizes.top_k / sizes.experts
    (fixed_bytes,) = sums([fixed.sent_bytes])
    facts = {**found.facts, "fixed_bytes": fixed_bytes, "capacity_of_even_load": fixed.capacity / even}
    return msgspec.structs.replace(found, facts=facts)


def beside_one_part(sizes: Sizes) -> Compared:
    """Compares our layer whose pipeline is searched for with the same in one part, from when it was found. facts: what the search
    took, and the same calls in one part."""
    exchange, module = joined(), experts_of(sizes, own_experts(sizes, dist.get_rank()))
    search = Search(PipelineSearch())
    searching, plain = Ours(sizes, module, exchange, search), Ours(sizes, module, exchange)
    batch, spent_s, calls = Batch.draw(sizes, rank=dist.get_rank(), number=0), [0.0, 0.0], 0
    while not search.choices and calls < MOST_CALLS:
        calls += 1
        taken = seconds_of(partial(run, searching, batch), partial(run, plain, batch))
        spent_s = [spent + each for spent, each in zip(spent_s, taken, strict=True)]
    if not search.choices:
        raise StepMismatch(f"nothing was chosen in {calls} calls")
    found = compared(sizes, searching, plain, exchange)
    facts = {
        "parts": search.choices[0].pipeline.parts, "calls_searching": calls, "searching_s": spent_s[0], "one_part_s": spent_s[1]
    }  # fmt: skip
    return msgspec.structs.replace(found, facts={**found.facts, **facts})


def joined() -> FlatExchange:
    """The exchange of this job's ranks, as `ExpertParallel` makes it."""
    store = dist.distributed_c10d.PrefixStore("bench", dist.distributed_c10d._get_default_store())
    return FlatExchange(dist.new_group(), dist.new_group(), store, timeout_s=EXCHANGE_S, lost=lambda: None)


def own_experts(sizes: Sizes, rank: int) -> range:
    """The experts of a rank."""
    first = rank * sizes.rank_experts
    return range(first, first + sizes.rank_experts)


def compared(sizes: Sizes, ours: Layer, other: Layer, exchange: FlatExchange) -> Compared:
    """Takes pairs of both layers on one batch. Raises StepMismatch where they are not equal, or ours
    sends other rows than it should."""
    rank = dist.get_rank()
    batch = Batch.draw(sizes, rank=rank, number=0)
    before_bytes = exchange.sent_bytes
    mine = passed(ours, batch)
    sent, expected = sums([exchange.sent_bytes - before_bytes, crossing_bytes(sizes, batch, rank)])
    check_sent(sent, expected)
    differences = {
        name: greatest(difference(one, another)) for name, one, another in zip(NAMES, mine, passed(other, batch), strict=True)
    }
    check_equal(differences)
    pairs = sample_pairs(sizes.rounds, partial(sample, sizes, ours, batch), partial(sample, sizes, other, batch))
    return Compared(pairs, differences, {"sent_bytes": sent, "row_bytes": float(sizes.row_bytes)})


def sample(sizes: Sizes, layer: Layer, batch: Batch, number: int) -> Sample:
    """The tokens of all ranks, forward and backward; the CPU time is that of all ranks."""

    def passes() -> None:
        for _ in range(sizes.passes):
            run(layer, batch)

    before_s = time.process_time()
    (seconds,) = seconds_of(passes)
    (cpu_s,) = sums([time.process_time() - before_s])
    return Sample(RANKS * sizes.tokens * sizes.passes, seconds, cpu_s)


def run(layer: Layer, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """A forward and a backward: the output, and the leaves that have the gradients of tokens and gates."""
    x, gates = batch.x.detach().requires_grad_(), batch.gates[0].detach().requires_grad_()
    for parameter in layer.parameters:
        parameter.grad = None
    y = layer(x, batch.ids[0], gates)
    y.backward(batch.grad)  # type: ignore[no-untyped-call]  # torch left it so
    return y, x, gates


def passed(layer: Layer, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What comes of a forward and a backward: what NAMES say."""
    y, x, gates = run(layer, batch)
    assert x.grad is not None
    assert gates.grad is not None
    return y.detach(), x.grad, gates.grad, gradients_of(layer)


def gradients_of(layer: Layer) -> Tensor:
    """The gradients of this rank's experts in a row."""
    gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in layer.parameters]
    return torch.cat([getattr(gradient, "_local_tensor", gradient).flatten() for gradient in gradients])


def difference(one: Tensor, another: Tensor) -> float:
    """The largest difference of two tensors, as a part of the largest element."""
    return float((one - another).abs().max() / another.abs().max())


def crossing_bytes(sizes: Sizes, batch: Batch, rank: int) -> int:
    """Bytes of a rank's rows that leave it and come back, in a forward and a backward: each crosses four times."""
    own = own_experts(sizes, rank)
    away = (batch.ids[0] < own.start) | (batch.ids[0] >= own.stop)
    return 4 * int(away.sum()) * sizes.row_bytes
