"""Small layers of stored experts, and equal resident ones, for tests of `StoredExperts`."""

# T tokens, K experts per token, D model
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.nn import ExpertSchedule, ResidentExperts, StoredExperts

LAYERS, EXPERTS, TOP_K, HIDDEN = 3, 6, 2, 8
ExpertFn = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


class Model(nn.Module):
    """Residual layers, each a fixed routing and a dense gate."""

    def __init__(self, layers: Sequence[nn.Module], *, token_count: int = 10, used_experts: int = EXPERTS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        generator = torch.Generator().manual_seed(1)
        scores = torch.rand(len(layers), token_count, used_experts, generator=generator)
        self.routing = scores.topk(TOP_K).indices
        self.gate = nn.Parameter(torch.rand(len(layers), token_count, TOP_K, generator=generator))
        self.wrap: Callable[..., Tensor] = lambda layer, *inputs: layer(*inputs)

    def forward(self, x_TD: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x_TD = x_TD + self.wrap(layer, x_TD, self.routing[index], self.gate[index].to(x_TD.dtype))
        return x_TD


def make_namespace(**arguments: Any) -> MemoryNamespace:
    return MemoryNamespace.of_swiglu(layers=LAYERS, experts=EXPERTS, hidden=HIDDEN, **arguments)


def make_stored(ns: MemoryNamespace, expert_fn: ExpertFn | None = None, **arguments: int) -> Model:
    group = ExpertSchedule()
    return Model([StoredExperts(ns, layer, expert_fn, group=group) for layer in ns.layers], **arguments)


def make_resident(ns: MemoryNamespace, expert_fn: ExpertFn | None = None, **arguments: int) -> Model:
    layers = [ResidentExperts([ns.values((layer, e)) for e in range(ns.experts)], expert_fn) for layer in ns.layers]
    return Model(layers, **arguments)


def make_tokens(dtype: torch.dtype = torch.float32, *, seed: int = 2) -> Tensor:
    return torch.randn(10, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def run(model: Model, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Runs forward and backward; gives the loss and the gradient of the tokens."""
    loss: Tensor = model(x_TD).float().square().sum()
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    assert x_TD.grad is not None
    return loss.detach(), x_TD.grad


def assert_pending_equal(ns: MemoryNamespace, resident: Model) -> None:
    for layer, module in zip(ns.layers, resident.layers, strict=True):
        assert isinstance(module, ResidentExperts)
        for expert, fields in enumerate(module.weights):
            assert isinstance(fields, torch.nn.ParameterDict)
            pending = ns.pending.get((layer, expert), {})
            for name, parameter in fields.items():
                if parameter.grad is None:
                    assert name not in pending, f"expert {(layer, expert)} had no token"
                else:
                    expected = parameter.grad.to(pending[name].dtype)
                    assert torch.equal(pending[name], expected), f"expert {(layer, expert)}, field {name}"


def assert_same_as_resident(ns: MemoryNamespace, stored: Model, resident: Model, x_TD: Tensor) -> None:
    loss, grad_x = run(stored, x_TD)
    expected_loss, expected_grad_x = run(resident, x_TD.detach().clone().requires_grad_())
    assert torch.equal(loss, expected_loss)
    assert torch.equal(grad_x, expected_grad_x)
    assert stored.gate.grad is not None
    assert resident.gate.grad is not None
    assert torch.equal(stored.gate.grad, resident.gate.grad)
    assert_pending_equal(ns, resident)
    assert ns.leased == []
