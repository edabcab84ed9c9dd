"""A loop that forgets its experts is told so, once; one that steps them by hand hears nothing."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

import paramstore_client as ps
from paramstore_client.training import Experts, bind
from paramstore_testkit.training.toy_moe import ToyMoE, adamw, batch, make_stored, plain_loop

pytestmark = pytest.mark.slow


def make(namespace: ps.Namespace) -> tuple[ToyMoE, Experts, torch.optim.Optimizer]:
    model = make_stored(namespace)
    experts = bind(model, namespace)
    return model, experts, adamw(model.parameters())


def warnings_of(loop: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loop()
    return [str(warning.message) for warning in seen]


def test_a_forgotten_attach_warns_once_at_the_second_forward(namespace: ps.Namespace) -> None:
    model, _, optimizer = make(namespace)
    assert warnings_of(lambda: plain_loop(model, optimizer, steps=1)) == []
    (message,) = warnings_of(lambda: plain_loop(model, optimizer, steps=3))
    assert f"namespace '{namespace.name}': an optimizer of the model has made a step" in message
    assert f"{namespace.pending_count} experts are still pending" in message
    assert "attach(optimizer), or" in message


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_commit_that_would_store_nothing_warns(namespace: ps.Namespace, micro_batches: int) -> None:
    model, experts, optimizer = make(namespace)
    for micro in range(micro_batches):
        model(batch(micro)).backward()
    optimizer.step()
    (message,) = warnings_of(lambda: experts.commit(1).wait())
    assert "commit(1) stores no update" in message
    assert warnings_of(lambda: experts.commit(2).wait()) == []


def test_experts_that_are_stepped_by_hand_bring_no_warning(namespace: ps.Namespace) -> None:
    """With accumulation, and by either handle."""
    model, experts, optimizer = make(namespace)

    def loop(step: Callable[[], object]) -> None:
        for number in range(2):
            model(batch(2 * number)).backward()
            model(batch(2 * number + 1)).backward()
            optimizer.step()
            step()
            optimizer.zero_grad()

    assert warnings_of(lambda: loop(lambda: namespace.apply(ps.AdamW(lr=0.1)))) == []
    model(batch(9)).backward()  # for the step after the one that is committed
    assert warnings_of(lambda: experts.commit(1).wait()) == []
    assert warnings_of(lambda: loop(lambda: experts.step(lr=0.1))) == []
    model(batch(9)).backward()
    optimizer.step()
    assert warnings_of(lambda: namespace.commit(2).wait()) == [], "a handle's own commit leaves pending gradients pending"
    assert warnings_of(lambda: experts.commit(3).wait()) == [], "and who has stepped by hand knows it"


@pytest.mark.parametrize("is_by_handle", [True, False])
def test_a_step_of_an_optimizer_of_something_else_brings_no_warning(namespace: ps.Namespace, is_by_handle: bool) -> None:
    """As that of a discriminator, between the micro-batches of experts that are stepped by hand."""
    model, experts, optimizer = make(namespace)
    other = torch.nn.Parameter(torch.ones(()))
    other_optimizer = adamw([other])

    def accumulate() -> None:
        for micro in range(2):
            model(batch(micro)).backward()
            (2 * other).backward()
            other_optimizer.step()

    def loop() -> None:
        for _ in range(2):
            accumulate()
            optimizer.step()
            if is_by_handle:
                namespace.apply(ps.AdamW(lr=0.1))
            else:
                experts.step(lr=0.1)
            optimizer.zero_grad()

    assert warnings_of(loop) == []


def test_who_has_applied_by_hand_may_do_so_more_seldom_than_the_optimizer_steps(namespace: ps.Namespace) -> None:
    model, experts, optimizer = make(namespace)
    plain_loop(model, optimizer, steps=1)
    namespace.apply(ps.AdamW(lr=0.1))
    namespace.commit(1).wait()
    assert warnings_of(lambda: plain_loop(model, optimizer, steps=3)) == []
    assert warnings_of(lambda: experts.commit(2).wait()) == []


def test_an_attached_optimizer_brings_no_warning_nor_does_its_end(namespace: ps.Namespace) -> None:
    model, experts, optimizer = make(namespace)
    experts.attach(optimizer)
    assert warnings_of(lambda: plain_loop(model, optimizer)) == []
    experts.detach()
    optimizer.zero_grad()
    assert warnings_of(lambda: plain_loop(model, optimizer)) == []
    assert warnings_of(lambda: experts.commit(1).wait()) == []


@pytest.mark.parametrize("is_attached", [True, False])
def test_nothing_looks_at_all_optimizers_once_one_is_detached_or_the_model_is_gone(
    namespace: ps.Namespace, is_attached: bool
) -> None:
    gc.collect()
    before = len(_global_optimizer_post_hooks)
    model, experts, optimizer = make(namespace)
    assert len(_global_optimizer_post_hooks) == before + 1
    if is_attached:
        experts.attach(optimizer)
        gc.collect()
        assert len(_global_optimizer_post_hooks) == before + 1, "of the attachment alone"
        experts.detach()
    else:
        del model, experts, optimizer
    gc.collect()
    assert len(_global_optimizer_post_hooks) == before
