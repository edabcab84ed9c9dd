"""What is declared, by whom, and who is left alone."""

from __future__ import annotations

import pytest
import torch

import paramstore_client as ps
from paramstore.core.visits import VISITS_MAX
from paramstore.errors import ConfigError
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore.wire import messages as m
from paramstore_client.device.visit_order import declare_order, declare_ring
from paramstore_client.hf.loading.stored_models import join
from paramstore_client.training import bind
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import Twin
from paramstore_testkit.wire.fake_daemon import FakeDaemon

RING = ((0, "routed"), (1, "routed"))


def test_a_trainers_order_is_that_of_its_steps(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    declare_order(namespace)
    declare_order(namespace, micro_batches=3)
    one, three = daemon.requests(m.DeclareSchedule)
    assert one.param_visits == (*RING, (1, "repeated"), (0, "repeated"), (1, "updated"), (0, "updated"))
    assert one.optim_visits == ((1, "gathered"), (0, "gathered"))
    assert three.param_visits == (*one.param_visits[:4] * 3, *one.param_visits[4:])


def test_more_micro_batches_than_a_cycle_holds_are_declared_as_many_as_it_does(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    declare_order(namespace, micro_batches=VISITS_MAX)
    (request,) = daemon.requests(m.DeclareSchedule)
    assert VISITS_MAX - 4 <= len(request.param_visits) <= VISITS_MAX


def test_a_readers_order_is_a_ring(daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace) -> None:
    namespace.commit(0).wait()
    with store.open_namespace("moe") as reader:
        declare_order(reader)
        declare_ring(reader, [1, 0])
    ring, reversed_ring = daemon.requests(m.DeclareSchedule)
    assert (ring.param_visits, ring.optim_visits) == (RING, ())
    assert reversed_ring.param_visits == RING[::-1]


def test_a_ring_declares_its_layers_when_it_begins(daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace) -> None:
    namespace.commit(0).wait()
    with store.open_namespace("moe") as reader:
        ring = ps.RingMemory(reader, slots=1, layers=[1, 0])
        assert not daemon.requests(m.DeclareSchedule)
        with ring:
            (request,) = daemon.requests(m.DeclareSchedule)
    assert request.param_visits == RING[::-1]


def test_a_ring_over_a_device_tier_declares_at_the_namespace(
    daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace
) -> None:
    namespace.commit(0).wait()
    with store.open_namespace("moe") as reader, ps.DeviceTier(reader, slots=4, device="cpu") as tier:
        declare_ring(tier, [0, 1])
    (request,) = daemon.requests(m.DeclareSchedule)
    assert request.param_visits == RING


def test_a_ring_leaves_a_trainers_order_alone(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    declare_ring(namespace, [0, 1])
    assert not daemon.requests(m.DeclareSchedule)


def test_sources_that_are_no_namespace_are_left_alone() -> None:
    memory = MemoryNamespace.of_swiglu()
    declare_order(memory)
    declare_ring(memory, [0, 1])
    assert not memory.events


@pytest.mark.parametrize("mode", ["write", "read"])
def test_an_older_daemon_is_told_nothing(
    daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    namespace.commit(0).wait()
    daemon.minor = m.TRAINING_MINOR - 1
    store.reconnect()
    with caplog.at_level("INFO"), store.open_namespace("moe", mode=mode) as handle:
        declare_order(handle)
        declare_ring(handle, [0, 1])
    assert not daemon.requests(m.DeclareSchedule)
    assert "no order of visits is declared: the daemon speaks protocol" in caplog.text


def test_binding_a_model_declares_its_steps(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    model = torch.nn.Linear(1, 1)
    experts = bind(model, namespace)
    (request,) = daemon.requests(m.DeclareSchedule)
    assert len(request.param_visits) == 6
    with pytest.raises(ConfigError, match="bound once"):
        bind(model, namespace)
    experts.expect_micro_batches(1)
    assert len(daemon.requests(m.DeclareSchedule)) == 1, "as declared"
    experts.expect_micro_batches(2)
    experts.expect_micro_batches(2)
    (_, request) = daemon.requests(m.DeclareSchedule)
    assert len(request.param_visits) == 10


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "expected"), [("write", 6), ("read", 2)])
def test_joining_a_model_of_transformers_declares_its_order(daemon: FakeDaemon, store: ps.Store, mode: str, expected: int) -> None:
    twin = Twin.of(tiny_config("mixtral"))
    schema = twin.layout.schema("adamw" if mode == "write" else None)
    writer = store.create_namespace("joined", schema, layers=twin.layout.layers, experts=twin.layout.experts)
    writer.initialize(lambda key: twin.namespace.values(key))
    writer.commit(0).wait()
    join(twin.stored, writer if mode == "write" else store.open_namespace("joined"), kernel="eager")
    (request,) = daemon.requests(m.DeclareSchedule)
    assert len(request.param_visits) == expected
