from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paramstore.errors import ConfigError, LeaseError
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.hf.model.layer_call import BackwardPasses, LayerCall, LayersUnderWay, WeightsOf
from paramstore_client.hf.model.weight_sources import StreamedSupply

KEYS = [(0, 1), (0, 2), (0, 4)]


class Layer:
    """Sums what each expert makes of x by its `down`; nothing comes between the product and the layer's end."""

    def __init__(self, *, lease_slots: int = 1) -> None:
        self.namespace = MemoryNamespace.of_swiglu(hidden=8, inner=8, lease_slots=lease_slots)
        self.passes = BackwardPasses()
        self.anchor = torch.zeros((), requires_grad=True)

    def __call__(self, x: Tensor) -> Tensor:
        supply = StreamedSupply(
            self.namespace, KEYS, torch.device("cpu"), forward_hint=lambda room: [], backward_hint=lambda room: []
        )

        def compute(weights_of: WeightsOf) -> Tensor:
            y = x
            for position in range(len(KEYS)):
                y = y @ weights_of(position)["down"]
            return y

        return LayerCall(supply, self.passes, compute, anchor=lambda: self.anchor).run([x])

    def expected(self, x: Tensor) -> tuple[Tensor, dict[tuple[int, int], Tensor]]:
        """Gradients of x and of each `down`."""
        weights = {key: self.namespace.values(key)["down"].clone().requires_grad_() for key in KEYS}
        x = x.detach().clone().requires_grad_()
        y = x
        for weight in weights.values():
            y = y @ weight
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad, {key: weight.grad for key, weight in weights.items() if weight.grad is not None}


def x_of(*, seed: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("is_reentrant", [True, False, None])
@pytest.mark.parametrize("lease_slots", [1, 2, 6])
def test_gradients_equal_those_of_weights_in_memory(is_reentrant: bool | None, lease_slots: int) -> None:
    layer, x = Layer(lease_slots=lease_slots), x_of()
    expected_x, expected = layer.expected(x)
    y = layer(x) if is_reentrant is None else checkpoint(layer, x, use_reentrant=is_reentrant)
    y.square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected_x)
    for key in KEYS:
        assert torch.equal(layer.namespace.pending[key]["down"], expected[key])
        assert not layer.namespace.pending[key]["gate_up"].any(), "a field that the kernel left unused gets zeros"
    assert not layer.namespace.leased


def test_anchor_gets_its_gradient_when_all_have_been_pushed() -> None:
    layer, pushed = Layer(), []
    layer.anchor.register_post_accumulate_grad_hook(lambda anchor: pushed.append(set(layer.namespace.pending)))
    layer(x_of()).sum().backward()
    assert pushed == [set(KEYS)]


def test_input_without_a_gradient_still_has_the_weights_get_theirs() -> None:
    layer = Layer()
    layer(x_of().detach()).sum().backward()
    assert set(layer.namespace.pending) == set(KEYS)


def test_forward_without_gradients_asks_for_no_anchor() -> None:
    layer = Layer()
    del layer.anchor
    with torch.no_grad():
        y = layer(x_of())
    assert not y.requires_grad


def test_second_derivative_is_refused() -> None:
    layer, x = Layer(), x_of()
    with pytest.raises(ConfigError, match="create_graph"):
        torch.autograd.grad(layer(x).sum(), [x], create_graph=True)


def test_a_layer_that_found_no_slot_begins_again_when_another_threads_has_ended() -> None:
    under_way, has_begun, may_end, tries = LayersUnderWay(), threading.Event(), threading.Event(), list[int]()

    def holding() -> Tensor:
        has_begun.set()
        assert may_end.wait(30)
        return torch.ones(1)

    def lacking() -> Tensor:
        tries.append(len(tries))
        if len(tries) == 1:
            may_end.set()
            raise LeaseError("another holds them")
        return torch.zeros(1)

    other = threading.Thread(target=lambda: under_way.compute(holding))
    other.start()
    assert has_begun.wait(30)
    with torch.no_grad():
        assert under_way.compute(lacking) == 0
    other.join(30)
    assert len(tries) == 2


def test_a_layer_that_lacks_slots_alone_or_under_a_graph_raises_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, tries = LayersUnderWay(), list[int]()

    def lacking() -> Tensor:
        tries.append(len(tries))
        raise LeaseError("nobody lets go of them")

    def beside_another() -> Tensor:
        with pytest.raises(LeaseError):
            under_way.compute(lacking)
        return torch.ones(1)

    with torch.no_grad(), pytest.raises(LeaseError):
        under_way.compute(lacking)
    assert len(tries) == 1
    under_way.compute(beside_another)  # under a graph
    assert len(tries) == 2
    monkeypatch.setattr("paramstore_client.hf.model.layer_call.OTHERS_WAIT_S", 0.0)
    with torch.no_grad():
        under_way.compute(beside_another)
    assert len(tries) == 3
