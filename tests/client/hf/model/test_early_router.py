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


def test_experts_of_most_tokens_come_first() -> None:
    hidden = torch.tensor([[9.0, 8, 0, 0], [9.0, 0, 8, 0], [9.0, 0, 8, 0]])
    assert EarlyRouter(Gate(), 4).guess(hidden) == [0, 2, 1]


def test_hooks_of_the_router_do_not_hear_of_a_guess() -> None:
    gate, heard = Gate(), list[int]()
    gate.register_forward_hook(lambda *_: heard.append(1))
    EarlyRouter(gate, 4).guess(torch.ones(1, 4))
    assert heard == []


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
