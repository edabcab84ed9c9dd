from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from paramstore_client.nn.weight_views import find_view, in_dtype_of

WEIGHTS = {"up": torch.arange(24.0).view(4, 6), "down": torch.arange(24.0, 48.0).view(6, 4)}


class Enter(torch.autograd.Function):
    """Puts weights into a graph, as a layer does."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.field_names = tuple(WEIGHTS)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *(None for _ in grads)


def test_view_of_a_weight_is_made_again_from_equal_bytes() -> None:
    for saved in (WEIGHTS["down"], WEIGHTS["up"].t(), WEIGHTS["up"][1:3, 2:], WEIGHTS["down"][3]):
        view = find_view(saved, 7, WEIGHTS)
        assert view is not None
        assert view.holder == 7
        assert torch.equal(view.of(WEIGHTS[view.field].clone()), saved)


def test_other_tensors_are_no_views() -> None:
    assert find_view(torch.ones(4, 6), 0, WEIGHTS) is None
    assert find_view(WEIGHTS["up"] * 2, 0, WEIGHTS) is None


def test_cast_of_a_weight_is_cast_again() -> None:
    up, down = Enter.apply(torch.zeros((), requires_grad=True), *WEIGHTS.values())  # type: ignore[no-untyped-call]
    for field, saved in (("up", up.to(torch.bfloat16).t()), ("down", down.to(torch.bfloat16))):
        view = find_view(saved, 0, WEIGHTS)
        assert view is not None
        assert (view.field, view.is_cast) == (field, True)
        again = view.of(WEIGHTS[field].clone())
        assert torch.equal(again, saved.detach())
        assert again.stride() == saved.stride()


def test_what_autocast_saves_of_a_weight_is_found() -> None:
    kept: list[bool] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(find_view(tensor, 0, WEIGHTS) is not None)
        return tensor

    up, _ = Enter.apply(torch.zeros((), requires_grad=True), *WEIGHTS.values())  # type: ignore[no-untyped-call]
    x = torch.ones(2, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", dtype=torch.bfloat16):
        functional.linear(x, up)
    assert sorted(kept) == [False, True], "the activation is kept, the cast weight is not"


def test_part_of_a_cast_is_kept_as_it_is() -> None:
    up, _ = Enter.apply(torch.zeros((), requires_grad=True), *WEIGHTS.values())  # type: ignore[no-untyped-call]
    assert find_view(up.to(torch.bfloat16)[1:], 0, WEIGHTS) is None


SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("stored", "tokens", "computed"),
    [
        ((SINGLE, SINGLE), SINGLE, (SINGLE, SINGLE)),
        ((SINGLE, SINGLE), BRAIN, (BRAIN, BRAIN)),
        ((SINGLE, SINGLE), HALF, (HALF, HALF)),
        ((HALF, HALF), BRAIN, (HALF, HALF)),  # neither is longer
        ((BRAIN, BRAIN), SINGLE, (BRAIN, BRAIN)),  # the kernel deals with it
        ((HALF, SINGLE), HALF, (HALF, SINGLE)),  # as Switch keeps one of its weights
    ],
)
def test_weights_compute_in_the_dtype_of_the_tokens_where_that_is_shorter(
    stored: tuple[torch.dtype, ...], tokens: torch.dtype, computed: tuple[torch.dtype, ...]
) -> None:
    weights = {name: WEIGHTS[name].to(dtype) for name, dtype in zip(WEIGHTS, stored, strict=True)}
    x = torch.ones(1, dtype=tokens)
    assert tuple(weight.dtype for weight in in_dtype_of(x, weights).values()) == computed
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert in_dtype_of(x, weights) is weights
