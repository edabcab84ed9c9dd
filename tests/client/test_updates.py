"""What a handle sends when it changes records."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import paramstore_client as ps
from paramstore.testing.fake_daemon import FakeDaemon
from paramstore.wire import messages as m

Gradient = Callable[[float], dict[str, torch.Tensor]]
KEYS = [(0, 0), (1, 1)]


def test_rollback_drops_pending_gradients_and_counts_the_epoch(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    namespace.commit(1).wait()
    namespace.push({(0, 0): gradient(1.0)})
    assert namespace.rollback(1) == namespace.epoch == 2
    assert namespace.apply(ps.AdamW()).wait()["records"] == 0


def test_apply_sends_the_options_of_the_optimizer(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    options = ps.AdamW(lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
    namespace.apply(options, grad_scale=0.5).wait()
    (request,) = daemon.requests(m.Apply)
    sent = (request.lr, request.beta1, request.beta2, request.eps, request.weight_decay, request.grad_scale)
    assert sent == (0.1, 0.8, 0.95, 1e-6, 0.2, 0.5)


def test_options_of_another_optimizer_are_refused_before_anything_is_sent(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    namespace.push({(0, 0): gradient(1.0)})
    with pytest.raises(ps.SchemaMismatch, match="SGD cannot update a namespace of schema kind 'adamw'"):
        namespace.apply(ps.SGD())
    assert not daemon.requests(m.Apply)
    assert namespace.apply(ps.AdamW()).wait()["records"] == 1, "what was pushed is pending still"


def test_another_optimizer_needs_a_daemon_that_knows_it(daemon: FakeDaemon, store: ps.Store) -> None:
    with store.create_namespace("sgd", ps.sgd_schema({"w": (4,)}), layers=1, experts=1) as namespace:
        namespace.apply(ps.SGD(lr=0.5, momentum=0.9), grad_scale=0.5).wait()
    (request,) = daemon.requests(m.Apply)
    assert request.options == {
        "kind": "sgd", "lr": 0.5, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False,
    }  # fmt: skip
    assert request.grad_scale == 0.5
    daemon.minor = m.TRAINING_MINOR - 1
    store.reconnect()
    with (
        store.create_namespace("old", ps.sgd_schema({"w": (4,)}), layers=1, experts=1) as namespace,
        pytest.raises(ps.VersionMismatch, match=r"apply\(SGD\) needs 1\.3"),
    ):
        namespace.apply(ps.SGD())


def test_pending_count_counts_keys_until_something_consumes_them(namespace: ps.Namespace, gradient: Gradient) -> None:
    assert namespace.pending_count == 0
    namespace.push({key: gradient(1.0) for key in KEYS})
    namespace.push({KEYS[0]: gradient(1.0)})
    assert namespace.pending_count == 2
    namespace.apply(ps.AdamW()).wait()
    assert namespace.pending_count == 0


def test_before_push_is_called_first_and_may_refuse(namespace: ps.Namespace, gradient: Gradient) -> None:
    called: list[int] = []

    def refuse() -> None:
        called.append(namespace.pending_count)
        raise ValueError("not now")

    end = namespace.before_push(refuse)
    with pytest.raises(ValueError, match="not now"):
        namespace.push({KEYS[0]: gradient(1.0)})
    end()
    end()
    namespace.push({KEYS[0]: gradient(1.0)})
    assert called == [0]
    assert namespace.pending_count == 1
