"""Experts modules of transformers, spread over ranks, compute what the unmodified ones do with all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.binding import bind
from paramstore_client.hf.model.layer_experts import ModelExperts
from paramstore_client.moe.exchange import FlatExchange
from paramstore_testkit.training.moe_families import CHANGES, families, modeling_class, tiny_config
from paramstore_testkit.training.moe_models import FAMILIES, Twin
from paramstore_testkit.training.thread_ranks import ThreadParallel, of_all, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

TOKENS = (5, 0, 17, 9)
PARTS = [slice(0, 5), slice(5, 5), slice(5, 22), slice(22, 31)]
TOP_K = 3
INNER = 32
"""Rows of whole vectors: bmm of the CPU's library may round by where a row begins, so that batched_mm has no bits at others."""
NOT_STORED = {"diffusion_gemma", "ernie4_5_vl_moe", "mistral_large4"}


def _check(
    family: str, kernel: str, dtype: torch.dtype, model_class: Any = None, *, is_autocast: bool = False
) -> None:  # fmt: skip
    inner = {name: INNER for name in CHANGES.get(family, {}) if name == "intermediate_size"}
    config = tiny_config(family, sizes={"moe_intermediate_size": INNER}, **inner)

    def twin() -> Twin:
        return Twin.of(config, kernel=kernel, lease_slots=3, dtype=dtype, model_class=model_class)

    reference = twin()
    path = reference.layout.modules[min(reference.layout.modules)]
    unmodified: Any = reference.stock.get_submodule(path)
    weight = unmodified.get_parameter(next(name for name in ("gate_up_proj", "up_proj") if hasattr(unmodified, name)))
    drawn = torch.Generator().manual_seed(3)
    width, count, experts = weight.shape[1 if unmodified.is_transposed else 2], sum(TOKENS), reference.layout.experts
    x, grad = (torch.randn(count, width, generator=drawn).to(dtype) for _ in range(2))
    ids = torch.stack([torch.randperm(experts, generator=drawn)[:TOP_K] for _ in range(count)])
    gates = torch.rand(count, TOP_K, generator=drawn).to(dtype)

    def compute(module: Any, tokens: slice = slice(None)) -> tuple[Tensor, ...]:
        given, weights = x[tokens].clone().requires_grad_(), gates[tokens].clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            y = module(given, ids[tokens], weights.bfloat16() if is_autocast else weights)
        y.backward(grad[tokens])
        assert given.grad is not None
        assert weights.grad is not None
        return y.detach(), given.grad, weights.grad

    twins = [twin() for _ in TOKENS]

    def rank(exchange: FlatExchange) -> tuple[Tensor, ...]:
        mine = twins[exchange.rank]
        spread = ModelExperts(mine.namespace, anchor=lambda layer: mine.anchor, parallel=ThreadParallel(exchange))
        bind(mine.stored, spread, kernel=kernel)
        return compute(mine.stored.get_submodule(path), PARTS[exchange.rank])

    expected, computed = compute(unmodified), of_all(run_ranks(len(TOKENS), rank))
    for what, wanted, *parts in zip(("y", "dx", "dgates"), expected, *computed, strict=True):
        if is_autocast:
            assert (torch.cat(parts) - wanted).norm() <= 2**-7 * wanted.norm(), f"{what} differs"
        else:
            assert torch.equal(torch.cat(parts), wanted), f"{what} differs"
    pending = {key: fields for mine in twins for key, fields in mine.namespace.pending.items()}
    assert len(pending) == sum(len(mine.namespace.pending) for mine in twins), "no expert on two ranks"
    for (_, expert), fields in pending.items():
        for name, gradient in fields.items():
            wanted = unmodified.get_parameter(name).grad[expert]
            if is_autocast:
                assert (gradient - wanted).norm() <= 2**-7 * wanted.norm(), (expert, name)
            elif kernel == "eager":
                assert torch.equal(gradient, wanted), (expert, name)
            elif dtype == torch.float32:
                assert (gradient - wanted).norm() <= 1e-6 * wanted.norm(), (expert, name)


@pytest.mark.parametrize("kernel", modeling.KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_spread_over_ranks_equals_the_unmodified_one(family: str, kernel: str) -> None:
    _check(family, kernel, torch.float32)


@pytest.mark.parametrize("kernel", modeling.KERNELS)
def test_a_family_in_bfloat16_does_too(kernel: str) -> None:
    _check("qwen3_moe", kernel, torch.bfloat16)


@pytest.mark.parametrize("kernel", modeling.KERNELS)
def test_under_autocast_it_is_a_rounding_of_bfloat16_apart(kernel: str) -> None:
    """The unmodified kernels multiply by the gates before they widen, where the rows come back widened."""
    _check("qwen3_moe", kernel, torch.float32, is_autocast=True)


@pytest.mark.soak
@pytest.mark.parametrize("kernel", modeling.KERNELS)
@pytest.mark.parametrize("family", sorted({*families()} - NOT_STORED - {*FAMILIES}))
def test_every_family_does(family: str, kernel: str) -> None:
    _check(family, kernel, torch.float32, modeling_class(families()[family]))
