"""The loops that users write, unchanged, on stored experts: what they compute in memory, bit for bit."""

# T tokens, D model

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR
from torch.utils.checkpoint import checkpoint

import paramstore_client as ps
from paramstore.errors import ConfigError
from paramstore_client.training import bind
from paramstore_testkit.training.toy_moe import HIDDEN, Pair, adamw, batch, make_resident, make_stored, plain_loop

CLOSE = {"rtol": 1e-4, "atol": 1e-6}
"""Weights after steps whose clip coefficients differ in the last bit: the norm's rounding depends on the order of its sums."""


# --- the step


def test_the_plain_loop_computes_what_it_does_in_memory(namespace: ps.Namespace) -> None:
    Pair.make(namespace).run_equal(plain_loop)


def test_an_optimizer_without_the_sentinel_gets_it(namespace: ps.Namespace) -> None:
    """Made of the parameters that need a gradient, which the sentinel does not before an optimizer is attached."""
    stored = make_stored(namespace)
    experts = bind(stored, namespace)
    resident = make_resident()
    optimizer = adamw([p for p in stored.parameters() if p.requires_grad])
    assert experts.sentinel.sentinel not in set(optimizer.param_groups[0]["params"])
    experts.attach(optimizer)
    assert optimizer.param_groups[-1]["params"][-1] is experts.sentinel.sentinel
    Pair(namespace, stored, experts, resident, optimizer, adamw(resident.parameters())).run_equal(plain_loop)


def test_the_sentinel_stays_0_and_costs_the_dense_weights_nothing(namespace: ps.Namespace) -> None:
    pair = Pair.make(namespace)
    plain_loop(pair.stored, pair.stored_optimizer)
    assert pair.experts.sentinel.sentinel.item() == 0.0


@pytest.mark.parametrize("kind", [{"foreach": True}, {"foreach": False}])
def test_other_kernels_of_adamw_agree_within_rounding(namespace: ps.Namespace, kind: dict[str, bool]) -> None:
    pair = Pair.make(namespace, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, **kind))
    pair.run(plain_loop)
    assert pair.differences(**CLOSE) == []


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_leads_a_namespace_of_its_own(new_namespace: Callable[..., ps.Namespace], momentum: float) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=momentum, weight_decay=0.1, fused=True)

    Pair.make(new_namespace(ps.sgd_schema), make).run_equal(plain_loop)


def test_adagrad_leads_a_namespace_of_its_own(new_namespace: Callable[..., ps.Namespace]) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=0.1, lr_decay=0.1, weight_decay=0.1, fused=True)

    Pair.make(new_namespace(ps.adagrad_schema), make).run_equal(plain_loop)


def test_adagrad_without_the_sentinel_gets_it_with_its_state(new_namespace: Callable[..., ps.Namespace]) -> None:
    namespace = new_namespace(ps.adagrad_schema)
    stored = make_stored(namespace)
    experts = bind(stored, namespace)
    optimizer = torch.optim.Adagrad([p for p in stored.parameters() if p.requires_grad])
    experts.attach(optimizer)
    plain_loop(stored, optimizer)


@pytest.mark.parametrize("is_made_before", [True, False], ids=["scheduler before", "scheduler after"])
@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=5),
    ],
    ids=["StepLR", "LambdaLR", "OneCycleLR"],
)
def test_schedulers_lead_the_experts(
    namespace: ps.Namespace, make_scheduler: Callable[[torch.optim.Optimizer], LRScheduler], is_made_before: bool
) -> None:
    made: dict[int, LRScheduler] = {}

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        if is_made_before:
            made[id(optimizer)] = make_scheduler(optimizer)
        return optimizer

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        scheduler = made.get(id(optimizer)) or make_scheduler(optimizer)
        rates = []
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step)).backward()
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
        return rates

    Pair.make(namespace, make).run_equal(loop)


def test_a_scheduler_made_before_an_optimizer_that_lacks_the_sentinel_goes_on(namespace: ps.Namespace) -> None:
    stored = make_stored(namespace)
    experts = bind(stored, namespace)
    optimizer = adamw([p for p in stored.parameters() if p.requires_grad])
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    experts.attach(optimizer)
    plain_loop(stored, optimizer, steps=1)
    scheduler.step()
    assert len(optimizer.param_groups) == 1


def test_a_tensor_as_lr_is_read_at_the_step(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        plain_loop(model, optimizer, steps=1)
        optimizer.param_groups[0]["lr"].fill_(0.05)
        plain_loop(model, optimizer, steps=2)

    pair = Pair.make(namespace, lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), fused=True))
    pair.run(loop)
    assert pair.differences(**CLOSE) == []  # the lr is an fp32 tensor there and a double here


def test_the_experts_take_the_weight_decay_of_the_main_group(namespace: ps.Namespace) -> None:
    """Decay for what has two dimensions or more, none for the rest: the scalar sentinel falls in with the rest."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        known = list(parameters)
        groups = [
            {"params": [p for p in known if p.ndim >= 2], "weight_decay": 0.2},
            {"params": [p for p in known if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)

    Pair.make(namespace, make).run_equal(plain_loop)


def test_a_weight_decay_of_their_own(namespace: ps.Namespace) -> None:
    pair = Pair.make(namespace, weight_decay=0.5)
    resident = pair.resident
    experts = [p for name, p in resident.named_parameters() if ".weights." in name]
    others = [p for name, p in resident.named_parameters() if ".weights." not in name]
    pair.resident_optimizer = torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.1}, {"params": experts, "weight_decay": 0.5}], lr=1e-2, fused=True
    )
    pair.run_equal(plain_loop)


def test_group_says_whose_lr_the_experts_take(namespace: ps.Namespace) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        known = list(parameters)
        return torch.optim.AdamW([{"params": known[:1], "lr": 0.5}, {"params": known[1:]}], lr=1e-2, fused=True)

    with pytest.raises(ConfigError, match="differ in lr: say with group="):
        Pair.make(namespace, make)
    Pair.make(namespace, make, group=1).run_equal(plain_loop)


def test_frozen_dense_weights_leave_the_experts_theirs(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
        for name, parameter in model.named_parameters():
            if ".weights." not in name and "sentinel" not in name:
                parameter.requires_grad_(False)
        return plain_loop(model, optimizer)

    Pair.make(namespace).run_equal(loop)


def test_a_frozen_model_under_a_head_outside_leaves_the_experts_theirs(namespace: ps.Namespace) -> None:
    stored, head = make_stored(namespace).requires_grad_(False), nn.Parameter(torch.ones(()))
    experts, optimizer = bind(stored, namespace), adamw([head])
    before = [namespace.read(key)["master/down"] for key in namespace.space]
    experts.attach(optimizer)
    (stored(batch(0)) * head).backward()
    optimizer.step()
    experts.settle()
    assert not all(torch.equal(namespace.read(key)["master/down"], old) for key, old in zip(namespace.space, before, strict=True))


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_experts_that_are_left_alone_get_no_gradients_whatever_the_optimizer(
    namespace: ps.Namespace, is_checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until an optimizer is attached that trains them."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
        if is_checkpointed:
            model.wrap = lambda fn, *inputs: checkpoint(fn, *inputs, use_reentrant=False)
        return plain_loop(model, optimizer)

    def dense(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.NAdam(parameters, lr=1e-2)

    pair = Pair.make(namespace, dense, experts=False)
    monkeypatch.setattr(namespace, "push", lambda gradients: pytest.fail("a push"))
    for name, parameter in pair.resident.named_parameters():
        parameter.requires_grad_(".weights." not in name)
    pair.run_equal(loop)
    empty = torch.zeros(0, dtype=torch.int64)
    assert not pair.stored.layers[0](torch.zeros(0, HIDDEN), empty.view(0, 2), torch.zeros(0, 2)).requires_grad
    assert pair.experts.commit(1).wait()["records"] == 0
    monkeypatch.undo()
    optimizer = adamw(pair.stored.parameters())
    pair.experts.attach(optimizer, experts=True)
    optimizer.zero_grad()
    before = namespace.read((0, 0))["master/down"]
    plain_loop(pair.stored, optimizer)
    pair.experts.settle()
    assert not torch.equal(namespace.read((0, 0))["master/down"], before)


def test_a_closure_may_run_forward_and_backward_inside_the_step(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
        losses = []
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                loss: Tensor = model(batch(step))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            loss = optimizer.step(closure)  # type: ignore[arg-type]
            losses.append(loss.item().hex())  # type: ignore[attr-defined]
        return losses

    Pair.make(namespace).run_equal(loop)


# --- several backwards


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        for micro in range(3):
            (model(batch(10 * step + micro)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_accumulate_before_the_step(namespace: ps.Namespace) -> None:
    Pair.make(namespace).run_equal(accumulate)


def test_two_losses_and_a_retained_graph_add_up(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2):
            optimizer.zero_grad()
            loss = model(batch(step))
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            model(batch(step + 5)).backward()
            optimizer.step()

    Pair.make(namespace).run_equal(loop)


def test_forwards_without_gradients_between_change_nothing(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2):
            loss = model(batch(step))
            model(batch(step + 7))  # never differentiated
            loss.backward()
            with torch.no_grad():
                model(batch(step + 8))
            optimizer.step()
            optimizer.zero_grad()

    Pair.make(namespace).run_equal(loop)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpointed_layers_are_reported_once_a_backward(namespace: ps.Namespace, is_reentrant: bool) -> None:
    pair = Pair.make(namespace)
    for model in (pair.stored, pair.resident):
        model.wrap = lambda fn, *inputs: checkpoint(fn, *inputs, use_reentrant=is_reentrant)
    asked = 0
    ask = pair.namespace.gradient_norm

    def count() -> float:
        nonlocal asked
        asked += 1
        return ask()

    pair.namespace.gradient_norm = count  # type: ignore[method-assign]
    pair.run_equal(accumulate)
    pair.run_equal(plain_loop)
    assert asked == 6 + 3


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_nested_checkpoints_are_reported_at_the_end(namespace: ps.Namespace, is_reentrant: bool) -> None:
    pair = Pair.make(namespace)
    for model in (pair.stored, pair.resident):
        inner = lambda fn, *inputs: checkpoint(fn, *inputs, use_reentrant=is_reentrant)  # noqa: E731
        model.wrap = lambda fn, *inputs, inner=inner: checkpoint(inner, fn, *inputs, use_reentrant=is_reentrant)
    pair.run_equal(plain_loop)


def test_autocast_changes_no_bit(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
        losses = []
        for step in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
        return losses

    Pair.make(namespace).run_equal(loop)


# --- clipping


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_the_global_norm_counts_the_experts(namespace: ps.Namespace, foreach: bool | None) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        norms = []
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)).backward()
            norms.append(float(clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)))
            optimizer.step()
        return norms

    pair = Pair.make(namespace)
    seen, expected = pair.run(loop)
    assert seen == pytest.approx(expected, rel=1e-5)
    assert min(expected) > 0.1, "it clips"
    assert pair.differences(**CLOSE) == []


def test_a_norm_below_the_limit_changes_no_bit(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)).backward()
            clip_grad_norm_(model.parameters(), 1e3)
            optimizer.step()

    Pair.make(namespace).run_equal(loop)


def test_the_norm_of_the_sentinel_is_that_of_the_experts(namespace: ps.Namespace) -> None:
    pair = Pair.make(namespace)
    for model in (pair.stored, pair.resident):
        model(batch(0)).backward()
    gradients = [p.grad for name, p in pair.resident.named_parameters() if ".weights." in name and p.grad is not None]
    expected = torch.nn.utils.get_total_norm(gradients)
    sentinel = pair.experts.sentinel.sentinel
    assert sentinel.grad is not None
    assert sentinel.grad.item() == pytest.approx(float(expected), rel=1e-6)
    assert pair.experts.gradient_norm() == pytest.approx(float(expected), rel=1e-6)


# --- the explicit path


def test_the_explicit_path_needs_no_hook(namespace: ps.Namespace) -> None:
    stored, resident = make_stored(namespace), make_resident()
    experts = bind(stored, namespace)
    dense = [p for name, p in stored.named_parameters() if not name.startswith("paramstore.")]
    optimizer, expected = adamw(dense), adamw(resident.parameters())
    for step in range(3):
        optimizer.zero_grad()
        stored(batch(step)).backward()
        norm = math.hypot(float(torch.nn.utils.get_total_norm([p.grad for p in dense])), experts.gradient_norm())
        torch.nn.utils.clip_grads_with_norm_(dense, 0.1, torch.tensor(norm))
        optimizer.step()
        experts.step(lr=1e-2, weight_decay=0.1, clip_coef=min(1.0, 0.1 / (norm + 1e-6)))
        expected.zero_grad()
        resident(batch(step)).backward()
        clip_grad_norm_(resident.parameters(), 0.1)
        expected.step()
    assert Pair(namespace, stored, experts, resident, optimizer, expected).differences(**CLOSE) == []


def test_the_explicit_step_knows_its_optimizers_options(namespace: ps.Namespace) -> None:
    experts = bind(make_stored(namespace), namespace)
    with pytest.raises(ConfigError, match="AdamW takes lr, betas, eps, weight_decay"):
        experts.step(momentum=0.9)


def test_after_detach_the_optimizer_steps_alone(namespace: ps.Namespace) -> None:
    pair = Pair.make(namespace)
    pair.run_equal(plain_loop)
    with pytest.raises(ConfigError, match="an optimizer is attached"):
        pair.experts.attach(pair.stored_optimizer)
    with pytest.raises(ConfigError, match="an optimizer is attached"):
        pair.experts.step()
    pair.experts.detach()
    pair.experts.detach()
    before = namespace.read((0, 0))["master/down"]
    plain_loop(pair.stored, pair.stored_optimizer)
    assert torch.equal(namespace.read((0, 0))["master/down"], before)
    assert pair.experts.abort() > 0
    pair.experts.attach(pair.stored_optimizer)


def test_reduce_is_checked(namespace: ps.Namespace) -> None:
    with pytest.raises(ConfigError, match="give 'mean' or 'sum'"):
        Pair.make(namespace, reduce="max")
