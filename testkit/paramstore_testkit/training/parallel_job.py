"""One layer of stored experts over the tokens of several ranks, computed by one process or by ranks: the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW
from paramstore.core.placement import Placement
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.moe.exchange import FlatExchange
from paramstore_client.moe.pipeline_plan import Pipeline
from paramstore_client.nn import StoredExperts
from paramstore_client.schemas import adamw_schema
from paramstore_testkit.training.thread_ranks import ThreadParallel, of_all, run_ranks


@dataclass(frozen=True, slots=True)
class Job:
    """Tokens of a job's ranks, and where they go. tokens: how many each rank has. width, inner: of an expert."""

    tokens: tuple[int, ...] = (5, 0, 17, 9)
    experts: int = 16
    top_k: int = 3
    dtype: torch.dtype = torch.float32
    seed: int = 0
    lease_slots: int = 3
    width: int = 24
    inner: int = 10

    def __str__(self) -> str:
        return f"{self.tokens}x{self.experts}x{self.top_k}-{self.dtype}"

    @property
    def parts(self) -> list[slice]:
        """The tokens of each rank among those of all."""
        return [slice(*bounds) for bounds in pairwise([0, *accumulate(self.tokens)])]

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, D], expert ids [T, K], gates [T, K] and the gradient of y [T, D], of all ranks."""
        drawn, count = torch.Generator().manual_seed(self.seed), sum(self.tokens)
        ids = [torch.randperm(self.experts, generator=drawn)[: self.top_k] for _ in range(count)]
        x, grad = (torch.randn(count, self.width, generator=drawn).to(self.dtype) for _ in range(2))
        gates = torch.rand(count, self.top_k, generator=drawn).to(self.dtype)
        return x, torch.stack(ids) if ids else torch.empty(0, self.top_k, dtype=torch.int64), gates, grad

    def namespace(self) -> MemoryNamespace:
        """A new namespace with the job's experts, the same each time."""
        shapes = {"gate_up": (2 * self.inner, self.width), "down": (self.width, self.inner)}
        made = MemoryNamespace(
            adamw_schema(shapes, param_dtype=self.dtype), layers=1, experts=self.experts, lease_slots=self.lease_slots
        )
        made.initialize(self._values)
        return made

    def _values(self, key: ExpertKey) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(1000 + key[1])
        return {
            "gate_up": torch.randn(2 * self.inner, self.width, generator=drawn) / self.width**0.5,
            "down": torch.randn(self.width, self.inner, generator=drawn) / self.inner**0.5,
        }


@dataclass(slots=True)
class Computed:
    """What came of one rank's tokens. pending: gradients that it pushed."""

    y: Tensor
    grad_x: Tensor
    grad_gate: Tensor
    pending: dict[ExpertKey, dict[str, Tensor]]

    @classmethod
    def of(
        cls, job: Job, namespace: MemoryNamespace, tokens: slice = slice(None), parallel: ThreadParallel | None = None,
        **options: Any,
    ) -> Computed:  # fmt: skip
        """Computes a forward and a backward of some of the job's tokens."""
        x, ids, gates, grad = (drawn[tokens] for drawn in job.draw())
        x, gates = x.clone().requires_grad_(), gates.clone().requires_grad_()
        y = StoredExperts(namespace, 0, parallel=parallel, **options)(x, ids, gates)
        y.backward(grad)
        assert x.grad is not None
        assert gates.grad is not None
        return cls(y.detach(), x.grad, gates.grad, dict(namespace.pending))

    @classmethod
    def by_ranks(cls, job: Job, placement: Placement | None = None, pipeline: Pipeline | None = None) -> Computed:
        """Computes a forward and a backward of all tokens, each rank those that it has."""

        def rank(exchange: FlatExchange) -> Computed:
            parallel = ThreadParallel(exchange, placement, pipeline)
            return cls.of(job, job.namespace(), job.parts[exchange.rank], parallel)

        return cls.together(of_all(run_ranks(len(job.tokens), rank)))

    @classmethod
    def together(cls, ranks: Sequence[Computed]) -> Computed:
        """What ranks computed, as if one had; asserts that no expert's gradient was pushed by two."""
        pending: dict[ExpertKey, dict[str, Tensor]] = {}
        for rank in ranks:
            assert pending.keys().isdisjoint(rank.pending)
            pending |= rank.pending
        y, grad_x, grad_gate = (torch.cat([getattr(rank, name) for rank in ranks]) for name in ("y", "grad_x", "grad_gate"))
        return cls(y, grad_x, grad_gate, pending)

    def check_equal(self, other: Computed) -> None:
        """Asserts that both are the same, bit for bit."""
        for name in ("y", "grad_x", "grad_gate"):
            assert torch.equal(getattr(self, name), getattr(other, name)), f"{name} differs"
        assert self.pending.keys() == other.pending.keys()
        for key, fields in self.pending.items():
            for name, gradient in fields.items():
                assert torch.equal(gradient, other.pending[key][name]), f"gradient of {name} of {key} differs"


def train(job: Job, namespace: MemoryNamespace, steps: int, step: Callable[[Job], object]) -> None:
    """Trains: step(job) computes a forward and backward of the job's tokens at each step; the experts are updated after it."""
    for number in range(steps):
        step(replace(job, seed=job.seed + number))
        namespace.apply(AdamW(lr=1e-2))
