"""One part's experts: each strategy gives the gradients, to the bit, that a graph which keeps all gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from paramstore.errors import ConfigError
from paramstore_client.moe.host_arena import HostArena
from paramstore_client.moe.part_graph import PartGraph
from paramstore_client.moe.pipeline_plan import REUSES, Pipeline

ROWS, WIDTH = 40, 24


def _layer(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Gated halves, a row's own sum, random numbers: strided views, the rows themselves, what differs each time."""

    def compute(x: Tensor) -> Tensor:
        gate, up = functional.linear(x, weight).chunk(2, dim=-1)
        return functional.dropout(functional.silu(gate) * up, 0.3) * x.sum(dim=1, keepdim=True)

    return compute


@pytest.mark.parametrize("reuse", REUSES)
def test_gradients_are_those_of_a_graph_that_keeps_all(reuse: str) -> None:
    drawn = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(ROWS, WIDTH, generator=drawn) for _ in range(2))
    weight = torch.randn(2 * WIDTH, WIDTH, generator=drawn, requires_grad=True)
    torch.manual_seed(1)
    plain_x = x.clone().requires_grad_()
    _layer(weight)(plain_x).backward(grad)
    wanted, weight.grad = weight.grad, None

    torch.manual_seed(1)
    pipeline, compute = Pipeline(reuse=reuse), _layer(weight)
    graph = PartGraph(pipeline, HostArena())
    graph.record(compute, x.clone())
    after = torch.get_rng_state()
    again = x.clone() if pipeline.sends_again else None
    got = graph.differentiate(compute, grad, kept=graph.take_kept(), x_MD=again, does_stay=False)
    assert torch.equal(got, plain_x.grad)
    assert torch.equal(weight.grad, wanted)
    assert torch.equal(torch.get_rng_state(), after), "random numbers go on where they were"


@pytest.mark.parametrize("reuse", REUSES)
def test_what_is_not_kept_is_nowhere_but_on_the_host(reuse: str) -> None:
    weight = torch.randn(2 * WIDTH, WIDTH, requires_grad=True)
    arena = HostArena()
    graph = PartGraph(Pipeline(reuse=reuse), arena)
    graph.record(_layer(weight), torch.randn(ROWS, WIDTH))
    assert (graph.kept_count > 0) == (reuse == "keep")
    assert (arena.size_bytes > 0) == (reuse in ("S1", "S2", "S3"))


def test_experts_whose_rows_get_no_gradient_give_zeros() -> None:
    graph = PartGraph(Pipeline(), HostArena())
    graph.record(lambda x: x.detach() * 2, torch.ones(ROWS, WIDTH))
    got = graph.differentiate(lambda x: x, torch.ones(ROWS, WIDTH), kept=[], x_MD=None, does_stay=False)
    assert torch.equal(got, torch.zeros(ROWS, WIDTH))


def test_what_saves_something_else_the_second_time_is_refused() -> None:
    graph, x = PartGraph(Pipeline(reuse="S4"), HostArena()), torch.ones(ROWS, WIDTH)
    graph.record(lambda x: x.exp(), x)
    with pytest.raises(ConfigError, match="saved 1 tensors in forward, 2 when they were computed again"):
        graph.differentiate(lambda x: x.exp().exp(), x, kept=[], x_MD=x, does_stay=False)
