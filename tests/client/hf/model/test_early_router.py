"""Early routers: one a layer is found in six families; guesses are what a router answers, those of most tokens first, no hook hears
of them, and a router that fails makes none. Whether they come true is measured, and not tested here."""

from __future__ import annotations

import pytest
import torch

from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.early_router import EarlyRouter, early_routers
from paramstore_client.hf.model.layout import find_layout
from paramstore_testkit.training.moe_families import families, modeling_class, tiny_config

FOUND = ("qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss", "olmoe", "glm4_moe")


class Gate(torch.nn.Module):
    """A router of 4 experts that says which columns of its input are the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, ids = (hidden @ self.weight).topk(2)
        return scores, ids


def test_the_likeliest_experts_come_first() -> None:
    """By how many tokens choose them, and by the place that they have among a token's choices."""
    assert EarlyRouter(Gate(), 4).guess(torch.tensor([[0.0, 8, 9, 0]])) == [2, 1]
    hidden = torch.tensor([[9.0, 8, 0, 0], [9.0, 0, 8, 0], [9.0, 0, 8, 0]])
    assert EarlyRouter(Gate(), 4).guess(hidden) == [0, 2, 1]


def test_hooks_of_the_router_do_not_hear_of_a_guess() -> None:
    gate, heard = Gate(), list[int]()
    gate.register_forward_hook(lambda *_: heard.append(1))
    EarlyRouter(gate, 4).guess(torch.ones(1, 4))
    assert heard == []


class Noisy(Gate):
    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training:
            hidden *= torch.empty_like(hidden).uniform_(0.5, 1.5)
        return super().forward(hidden)


class Wrong(Gate):
    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, torch.tensor([[-1, 3, 4, 1 << 40]])


class Shard(torch.Tensor):
    """A weight that is not whole here."""


def test_a_router_makes_no_noise_for_a_guess_and_leaves_its_input() -> None:
    gate, hidden = Noisy().train(), torch.tensor([[9.0, 8, 0, 0]])
    state = torch.get_rng_state()
    assert EarlyRouter(gate, 4).guess(hidden) == [0, 1]
    assert torch.equal(hidden, torch.tensor([[9.0, 8, 0, 0]]))
    assert torch.equal(torch.get_rng_state(), state)
    assert gate.training


def test_a_guess_follows_the_weights_that_the_router_has_by_then() -> None:
    gate = Gate()
    router = EarlyRouter(gate, 4)
    gate.weight = torch.nn.Parameter(torch.eye(4).flip(0))
    assert router.guess(torch.tensor([[9.0, 8, 0, 0]])) == [3, 2]


def test_a_cast_that_autocast_keeps_has_its_graph() -> None:
    """Made without a graph, and kept, it would leave the router without a gradient."""
    gate = Gate()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        EarlyRouter(gate, 4).guess(torch.ones(1, 4))
        torch.nn.functional.linear(torch.ones(1, 4), gate.weight).sum().backward()
    assert gate.weight.grad is not None


def test_what_is_no_plain_weight_is_not_asked() -> None:
    gate = Gate()
    router = EarlyRouter(gate, 4)
    gate._parameters["weight"] = torch.nn.Parameter(torch.eye(4).as_subclass(Shard))
    assert router.votes(torch.ones(1, 4)) is None


def test_choices_that_are_no_experts_are_counted_apart() -> None:
    router = EarlyRouter(Wrong(), 4)
    votes = router.votes(torch.ones(1, 4))
    assert votes is not None
    assert [vote > 0 for vote in votes.tolist()] == [False, False, False, True, True]
    assert router.ranked(votes.tolist()) == []
    assert router.votes(torch.ones(1, 4)) is None, "it is not asked again"


def test_a_router_that_fails_makes_no_guesses_and_fails_nothing() -> None:
    router = EarlyRouter(Gate(), 4)
    assert router.guess(torch.ones(1, 5)) == []
    assert router.guess(torch.ones(1, 4)) == [], "it is not asked again"
    assert EarlyRouter(torch.nn.Linear(4, 4), 4).guess(torch.ones(1, 4)) == [], "its answer names no experts"


@pytest.mark.parametrize("family", FOUND)
def test_every_layer_of_a_family_has_a_router(family: str) -> None:
    model = modeling.on_meta(modeling_class(families()[family]), tiny_config(family))
    layout = find_layout(model)
    assert set(early_routers(model, layout)) == set(layout.layers)
