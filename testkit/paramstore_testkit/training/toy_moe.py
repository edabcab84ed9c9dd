"""A small model with routers and experts, stored or resident, with equal values, so that tests can compare training loops.

A test writes its loop once, as a user would, and runs it on both. The resident experts are parameters of their own, so that one
without tokens has no gradient and torch's optimizer leaves it alone: the rule `touched`.
"""

# T tokens, K experts per token, D model, E experts
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import paramstore_client as ps
from paramstore.core.key import ExpertKey
from paramstore_client.nn import ResidentExperts, StoredExperts
from paramstore_client.training import Experts, bind

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER, VOCABULARY, TOKENS = 2, 4, 2, 8, 12, 16, 3
FIELDS = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Loop = Callable[[nn.Module, torch.optim.Optimizer], Any]
"""Function of (model, optimizer) whose results must be equal: losses, norms."""


def initial_value(key: ExpertKey) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * key[0] + key[1])
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in FIELDS.items()}


class ToyMoE(nn.Module):
    """Embedding, residual layers of router and experts, head. wrap: runs each layer, for checkpointing."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
            self.routers = nn.ModuleList(nn.Linear(HIDDEN, EXPERTS) for _ in layers)
            self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(layers)
        self.wrap: Callable[..., Tensor] = lambda fn, *inputs: fn(*inputs)

    def forward(self, tokens_T: Tensor) -> Tensor:
        """Computes the loss of predicting each token from itself, shifted by one in the vocabulary."""
        x_TD = self.embedding(tokens_T)
        for index in range(len(self.layers)):
            x_TD = self.wrap(self._layer, index, x_TD)
        return functional.cross_entropy(self.head(x_TD), (tokens_T + 1) % VOCABULARY)

    def _layer(self, index: int, x_TD: Tensor) -> Tensor:
        gate_TK, ids_TK = self.routers[index](x_TD).softmax(-1).topk(TOP_K)
        y_TD: Tensor = x_TD + self.layers[index](x_TD, ids_TK, gate_TK)
        return y_TD


def batch(step: int) -> Tensor:
    """Draws the tokens of a step: so few that some experts get none."""
    return torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(step))


def make_resident() -> ToyMoE:
    layers = [ResidentExperts([initial_value((layer, expert)) for expert in range(EXPERTS)]) for layer in range(LAYERS)]
    return ToyMoE(list(layers))


def make_namespace(store: ps.Store, name: str, make_schema: Callable[..., ps.Schema] = ps.adamw_schema) -> ps.Namespace:
    """Makes a namespace of the model's experts, committed as step 0."""
    made = make_schema(FIELDS, param_dtype="float32")
    namespace = store.create_namespace(name, made, layers=LAYERS, experts=EXPERTS)
    namespace.initialize(initial_value)
    namespace.commit(0).wait()
    return namespace


def make_stored(namespace: ps.Namespace, *, parallel: ps.moe.ExpertParallel | None = None) -> ToyMoE:
    group = ps.nn.ExpertSchedule()
    return ToyMoE([StoredExperts(namespace, layer, group=group, parallel=parallel) for layer in range(LAYERS)])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


@dataclass
class Pair:
    """The model stored and resident, and an optimizer of each, made by the same function of the parameters."""

    namespace: ps.Namespace
    stored: ToyMoE
    experts: Experts
    resident: ToyMoE
    stored_optimizer: torch.optim.Optimizer
    resident_optimizer: torch.optim.Optimizer

    @classmethod
    def make(cls, namespace: ps.Namespace, make_optimizer: MakeOptimizer = adamw, **attach: Any) -> Pair:
        """Makes both models and optimizers, the stored one attached."""
        stored, resident = make_stored(namespace), make_resident()
        experts = bind(stored, namespace)
        pair = cls(
            namespace, stored, experts, resident, make_optimizer(stored.parameters()), make_optimizer(resident.parameters())
        )
        experts.attach(pair.stored_optimizer, **attach)
        return pair

    def run(self, loop: Loop) -> tuple[Any, Any]:
        """Runs the loop on both models; gives the results of (stored, resident)."""
        return loop(self.stored, self.stored_optimizer), loop(self.resident, self.resident_optimizer)

    def run_equal(self, loop: Loop) -> None:
        """Runs the loop on both models; checks that results are equal, and weights bit for bit."""
        seen, expected = self.run(loop)
        assert seen == expected
        assert self.differences() == []

    def differences(self, *, rtol: float = 0.0, atol: float = 0.0) -> list[str]:
        """Names the weights that are not equal, dense ones and experts'."""
        return different_weights(self.stored, self.resident, self.namespace, rtol=rtol, atol=atol)


def different_weights(
    stored: nn.Module, resident: nn.Module, namespace: ps.Namespace, *, rtol: float = 0.0, atol: float = 0.0
) -> list[str]:
    """Names the weights that differ, as `Pair.differences` does."""
    values = {name: value.detach() for name, value in stored.named_parameters() if not name.endswith("paramstore.sentinel")}
    for layer, expert in namespace.space:
        record = namespace.read((layer, expert))
        values |= {f"layers.{layer}.weights.{expert}.{name}": record[f"master/{name}"] for name in FIELDS}
    expected = dict(resident.named_parameters())
    assert values.keys() == expected.keys()
    return [
        name for name, value in values.items() if not torch.allclose(value, expected[name], rtol=rtol, atol=atol, equal_nan=True)
    ]


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 3) -> list[str]:
    """Runs the loop of every tutorial; gives losses as exact text."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses
