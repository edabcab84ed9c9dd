"""What a handle sends when it changes records."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode

import paramstore_client as ps
from paramstore.wire import messages as m
from paramstore_testkit.wire.fake_daemon import FakeDaemon

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


WRITERS: dict[str, Callable[[ps.Namespace], object]] = {
    "initialize": lambda ns: ns.initialize(lambda key: {}), "begin_initialize": lambda ns: ns.begin_initialize(),
    "push": lambda ns: ns.push({}), "apply": lambda ns: ns.apply(ps.AdamW()), "begin_apply": lambda ns: ns.begin_apply(ps.AdamW()),
    "commit": lambda ns: ns.commit(1), "prepare": lambda ns: ns.prepare(1), "finalize": lambda ns: ns.finalize(1),
    "rollback": lambda ns: ns.rollback(1),
}  # fmt: skip


@pytest.mark.parametrize("call", WRITERS)
def test_what_a_reader_may_not_do_is_refused_by_its_own_handle(
    call: str, daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace
) -> None:
    namespace.commit(1).wait()
    with store.open_namespace("moe") as reader:
        sent = len(daemon.requests(m.Message))
        with pytest.raises(ps.SchemaMismatch, match=f"{call}: namespace 'moe' is open for reading: open it with mode='write'"):
            WRITERS[call](reader)
        assert len(daemon.requests(m.Message)) == sent, "nothing was sent"
        assert repr(reader) == "<Namespace 'moe', 2 x 4 experts, committed 1, read at 1, 16 lease slots>"


def test_numbers_of_numpy_are_sent_as_plain_ones(daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient) -> None:
    namespace.push({(numpy.int64(0), numpy.int64(1)): gradient(1.0)})
    namespace.apply(ps.AdamW(lr=numpy.float32(0.5)), grad_scale=numpy.float64(2)).wait()
    namespace.commit(numpy.int32(3), bytearray(b"ab")).wait()
    (applied,), (committed,) = daemon.requests(m.Apply), daemon.requests(m.Commit)
    assert (applied.lr, applied.grad_scale, committed.step, committed.extra) == (0.5, 2.0, 3, b"ab")


@pytest.mark.parametrize("wrong", [torch.optim.AdamW([torch.zeros(1)]), {"lr": 1}, None, 1e-3], ids=lambda one: type(one).__name__)
def test_what_are_no_options_is_told_what_to_give(
    wrong: object, daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    namespace.push({KEYS[0]: gradient(1.0)})
    for call in (namespace.apply, namespace.begin_apply):
        with pytest.raises(ps.SchemaMismatch, match=r"give one of ps\.AdamW\(\.\.\.\)"):
            call(wrong)
    assert daemon.requests(m.Apply) == daemon.requests(m.BeginApply) == []
    assert namespace.pending_count == 1


WITHOUT_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "meta tensor": lambda value: value.to("meta"), "torch.sparse_coo tensor": torch.Tensor.to_sparse,
    "nested tensor": lambda value: torch.nested.nested_tensor(list(value)), "FakeTensor": FakeTensorMode().from_tensor,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", WITHOUT_VALUES)
def test_a_gradient_without_values_in_memory_is_refused(kind: str, namespace: ps.Namespace, gradient: Gradient) -> None:
    wrong = {name: WITHOUT_VALUES[kind](value) for name, value in gradient(1.0).items()}
    with pytest.raises(ps.SchemaMismatch, match=f"a {kind} has not every value in memory"):
        namespace.push({KEYS[0]: gradient(1.0), KEYS[1]: wrong})
    assert namespace.pending_count == 0
