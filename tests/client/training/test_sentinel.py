"""The sentinel is seen by whoever looks at parameters, and by nobody who saves, casts or shards them."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paramstore_client.training.sentinel import ExpertSentinel


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def before_forward(self) -> None:
        self.heard.append("forward")

    def after_layer(self, layer: int) -> None:
        self.heard.append(f"layer {layer}")

    def after_backward(self) -> None:
        self.heard.append("backward")


@pytest.fixture
def model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("paramstore", ExpertSentinel())
    return model


def sentinel_of(model: nn.Module) -> ExpertSentinel:
    child = model.get_submodule("paramstore")
    assert isinstance(child, ExpertSentinel)
    return child


def test_a_copy_of_the_model_shares_it(model: nn.Module) -> None:
    again = copy.deepcopy(model)
    assert sentinel_of(again) is sentinel_of(model)
    assert again.get_submodule("0") is not model.get_submodule("0")


def test_it_goes_with_its_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("paramstore", ExpertSentinel())
    known = weakref.ref(sentinel_of(model))
    del model
    gc.collect()
    assert known() is None


def test_a_models_state_dict_has_none_and_misses_none(model: nn.Module) -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert str(model.load_state_dict(plain.state_dict(), strict=True)) == "<All keys matched successfully>"
    plain.load_state_dict(model.state_dict(), strict=True)


def test_parameters_lists_it_last_and_fully_shard_does_not_see_it(model: nn.Module) -> None:
    assert list(model.parameters())[-1] is sentinel_of(model).sentinel
    assert "paramstore.sentinel" in dict(model.named_parameters())
    assert [name for module in model.modules() for name, _ in module.named_parameters(recurse=False)] == ["weight", "bias"]


def test_it_keeps_its_dtype_and_its_bytes(model: nn.Module) -> None:
    model.to(torch.bfloat16).half()
    assert sentinel_of(model).sentinel.dtype is torch.float32
    model.to("meta")
    assert sentinel_of(model).sentinel.item() == 0.0


def test_the_anchor_hears_of_forwards_and_of_the_end_of_each_backward() -> None:
    sentinel, listener = ExpertSentinel(), Listener()
    (sentinel.anchor(0) * 2).backward()
    sentinel.listener = listener
    loss = sentinel.anchor(1) * 2 + sentinel.anchor(0) + sentinel.anchor(1)
    loss.backward(retain_graph=True)
    loss.backward()
    assert listener.heard[:3] == ["forward"] * 3
    for heard in (listener.heard[3:6], listener.heard[6:]):
        assert (sorted(heard[:2]), heard[2:]) == (["layer 0", "layer 1"], ["backward"])


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_recomputation_is_no_forward_and_its_backward_no_backward(is_reentrant: bool) -> None:
    sentinel, listener = ExpertSentinel(), Listener()
    sentinel.listener = listener
    x = torch.ones((), requires_grad=True)
    loss = sum(checkpoint(lambda y: y * sentinel.anchor(0), x, use_reentrant=is_reentrant) for _ in range(3))
    listener.heard.clear()
    loss.backward()
    assert listener.heard == [*["layer 0"] * (3 if is_reentrant else 1), "backward"]
