"""Our layer, as the bench sets it beside others: it computes what the whole module computes, and sends what the routing says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paramstore_bench.moe.comparing import crossing_bytes, difference, own_experts, passed
from paramstore_bench.moe.layers import Ours, experts_of
from paramstore_bench.moe.sizes import RANKS, Batch, Sizes
from paramstore_client.moe.exchange import FlatExchange
from paramstore_testkit.training.thread_ranks import of_all, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

Passed = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.mark.parametrize("width", [4, 24])
def test_ranks_compute_what_the_module_computes_and_send_what_the_routing_says(width: int) -> None:
    sizes = Sizes(experts=8, width=width, inner=16, tokens=12, top_k=3, skew=1.0)
    batches = [Batch.draw(sizes, rank=rank, number=0) for rank in range(RANKS)]

    def rank(exchange: FlatExchange) -> tuple[Passed, int]:
        layer = Ours(sizes, experts_of(sizes, own_experts(sizes, exchange.rank)), exchange)
        return passed(layer, batches[exchange.rank]), exchange.sent_bytes

    found = of_all(run_ranks(RANKS, rank))
    module = experts_of(sizes, range(sizes.experts))
    for number, ((y, grad_x, grad_gates, _), _) in enumerate(found):
        batch = batches[number]
        x, gates = batch.x.clone().requires_grad_(), batch.gates[0].clone().requires_grad_()
        expected = module(x, batch.ids[0], gates)
        expected.backward(batch.grad)
        for one, another in ((y, expected.detach()), (grad_x, x.grad), (grad_gates, gates.grad)):
            assert another is not None
            assert difference(one, another) < 1e-5
    weights = torch.cat([gradients for (_, _, _, gradients), _ in found])
    own = [torch.cat([p.grad[list(own_experts(sizes, r))].flatten() for p in module.parameters()]) for r in range(RANKS)]
    assert difference(weights, torch.cat(own)) < 1e-5
    sent = sum(sent_bytes for _, sent_bytes in found)
    assert sent == sum(crossing_bytes(sizes, batch, number) for number, batch in enumerate(batches))
