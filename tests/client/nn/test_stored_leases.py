"""Leases of stored experts live for a forward or a backward and no longer; prefetch takes the room beside them."""

# T tokens, K experts per token, D model
# ruff: noqa: N803 - shape suffixes, as the legend says

import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paramstore.core.optimizers import AdamW
from paramstore.errors import StepMismatch
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.nn import StoredExperts, swiglu
from paramstore_testkit.training.small_experts import (
    EXPERTS,
    Model,
    make_namespace,
    make_resident,
    make_stored,
    make_tokens,
    run,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# --- leases


def test_no_lease_is_held_between_forward_and_backward() -> None:
    ns = make_namespace()
    loss = make_stored(ns)(make_tokens()).sum()
    assert loss.requires_grad
    assert ns.leased == []


def test_nothing_of_a_slot_lives_on_in_the_graph() -> None:
    ns = make_namespace(lease_slots=4)
    buffers = []
    acquire = ns.acquire

    def watched_acquire(*arguments: object, **options: object) -> object:
        lease = acquire(*arguments, **options)
        buffers.extend(weakref.ref(buffer) for buffer in lease.buffers.values())
        return lease

    ns.acquire = watched_acquire
    for context in (nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            y = make_stored(ns)(make_tokens())
            assert y.grad_fn is not None
            assert len(buffers) > EXPERTS
            assert [buffer for buffer in buffers if buffer() is not None] == []


def test_a_graph_that_is_dropped_leaves_nothing_for_the_collector() -> None:
    kept = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            ctx.mark = Mark()
            kept.append(weakref.ref(ctx.mark))
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            return grads[0]

    layer = StoredExperts(make_namespace(), 0, lambda x_tD, weights: Watched.apply(swiglu(x_tD, weights)))
    gc.disable()
    try:
        y = layer(make_tokens(), torch.zeros(10, 1, dtype=torch.long), torch.ones(10, 1))
        assert kept[0]() is not None
        del y
        assert kept[0]() is None
    finally:
        gc.enable()


def test_without_grad_nothing_is_recorded_or_held() -> None:
    ns = make_namespace(lease_slots=4)
    with torch.no_grad():
        y = make_stored(ns)(make_tokens())
    assert y.grad_fn is None
    assert ns.leased == []
    assert torch.equal(y, make_resident(ns)(make_tokens()))


class RefusedError(Exception):
    pass


class Mark:
    """Something a graph node owns."""


@contextmanager
def leaves_no_lease(ns: MemoryNamespace) -> Iterator[None]:
    with pytest.raises(RefusedError):
        yield
    assert ns.leased == []


def test_an_error_in_forward_ends_the_lease() -> None:
    def refuse(x_tD: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        raise RefusedError

    ns = make_namespace(lease_slots=4)
    with leaves_no_lease(ns):
        make_stored(ns, refuse)(make_tokens())
    with leaves_no_lease(ns), torch.no_grad():
        make_stored(ns, refuse)(make_tokens())


class RefuseBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        raise RefusedError


def test_an_error_in_backward_ends_the_lease_and_pushes_nothing_of_its_part() -> None:
    ns = make_namespace(lease_slots=4)
    model = make_stored(ns, lambda x_tD, weights: RefuseBackward.apply(swiglu(x_tD, weights)))
    loss = model(make_tokens()).sum()
    with leaves_no_lease(ns):
        loss.backward()
    assert ns.pending == {}


def test_an_error_of_push_reaches_the_caller_of_backward() -> None:
    def refuse(gradients: object) -> None:
        raise RefusedError

    ns = make_namespace()
    loss = make_stored(ns)(make_tokens()).sum()
    ns.push = refuse
    with leaves_no_lease(ns):
        loss.backward()


def test_a_second_backward_works_if_the_graph_was_kept_and_raises_if_not() -> None:
    ns, once = make_namespace(lease_slots=4), make_namespace()
    run(make_stored(once), make_tokens())
    loss = make_stored(ns)(make_tokens()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(ns.pending[0, 0]["down"], once.pending[0, 0]["down"] * 2)
    pushes = len(list(ns.happened("push")))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert len(list(ns.happened("push"))) == pushes
    assert ns.leased == []


def test_an_update_between_forward_and_backward_is_refused() -> None:
    ns = make_namespace()
    model = make_stored(ns)
    run(model, make_tokens())
    loss = model(make_tokens()).sum()
    ns.apply(AdamW())
    with pytest.raises(StepMismatch, match=r"expert \(2, 0\): forward computed with epoch 0 version 0"):
        loss.backward()
    assert ns.leased == []
    assert ns.pending == {}


# --- prefetch


def prefetched_beside(ns: MemoryNamespace) -> list[tuple[int, tuple[int, ...]]]:
    """(layer acquired, layers prefetched while it was held), in order."""
    beside: list[tuple[int, list[int]]] = []
    for kind, keys in ns.happened("acquire", "prefetch"):
        if kind == "acquire":
            beside.append((keys[0][0], []))
        else:
            beside[-1][1].append(keys[0][0])
    return [(layer, tuple(layers)) for layer, layers in beside]


def test_layers_prefetch_the_next_in_the_direction_of_travel() -> None:
    ns = make_namespace()
    model = make_stored(ns)
    run(model, make_tokens())
    ns.events.clear()
    run(model, make_tokens())
    assert prefetched_beside(ns) == [(0, (1,)), (1, (2,)), (2, ()), (2, (1,)), (1, (0,)), (0, ())]


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_recomputation_prefetches_downwards(is_reentrant: bool) -> None:
    ns = make_namespace()
    model = make_stored(ns)
    model.wrap = lambda layer, *inputs: checkpoint(layer, *inputs, use_reentrant=is_reentrant)
    run(model, make_tokens())
    ns.events.clear()
    run(model, make_tokens())
    forward = [(0, (1,)), (1, (2,)), (2, ())]
    backward = [(2, (1,)), (2, (1,)), (1, (0,)), (1, (0,)), (0, ()), (0, ())]
    assert prefetched_beside(ns) == forward + backward


@pytest.mark.parametrize("lease_slots", [1, 3, 4])
def test_prefetch_takes_only_the_room_beside_the_lease(lease_slots: int) -> None:
    ns = make_namespace(lease_slots=lease_slots)
    model = make_stored(ns)
    for _ in range(2):
        run(model, make_tokens())
    held = 0
    for kind, keys in ns.happened("acquire", "release", "prefetch"):
        held = {"acquire": len(keys), "release": 0}.get(kind, held)
        assert held + (len(keys) if kind == "prefetch" else 0) <= lease_slots


def test_layers_without_a_group_prefetch_only_their_own_parts() -> None:
    ns = make_namespace(lease_slots=4)
    run(Model([StoredExperts(ns, layer) for layer in ns.layers]), make_tokens())
    assert all(beside in ((), (layer,)) for layer, beside in prefetched_beside(ns))
