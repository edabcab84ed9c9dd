"""Gradients for an apply that is open: the daemon is told of each key once, and calls out of order are refused here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import paramstore_client as ps
from paramstore.testing.clock import ManualClock
from paramstore.wire import messages as m
from paramstore_client.gradients.pending import LEAST_WAIT_S
from paramstore_testkit.wire.fake_daemon import FakeDaemon, FakeSession

Gradient = Callable[[float], dict[str, torch.Tensor]]


def pending(daemon: FakeDaemon, key: tuple[int, int]) -> torch.Tensor:
    """What the daemon would apply to `key`'s `down`."""
    return daemon.namespaces["moe"].gradient(key)["down"]


def test_an_open_apply_is_told_of_every_key_once_also_of_those_it_knew(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    namespace.push({(0, 0): gradient(1.0), (1, 3): gradient(3.0)})
    namespace.begin_apply(ps.AdamW(lr=0.5), grad_scale=2.0)
    assert namespace.is_applying
    namespace.push({(0, 0): gradient(0.5), (0, 1): gradient(4.0)})
    first, last = daemon.requests(m.Push)
    assert (first.is_last, last.is_last) == (False, True)
    assert {entry[:2] for entry in last.entries} == {(0, 0), (0, 1)}
    assert first.entries[0] in last.entries
    assert (pending(daemon, (0, 0)) == 1.5).all()
    free_bytes, before = namespace._area.free_bytes, namespace._area.free_bytes()
    assert namespace.end_apply().wait()["records"] == 3
    assert free_bytes() > before
    assert not namespace.is_applying
    assert namespace.uncommitted_applies == 1
    (begun,) = daemon.requests(m.BeginApply)
    assert (begun.lr, begun.grad_scale) == (0.5, 2.0)


def test_a_second_push_of_a_key_is_refused_and_adds_nothing(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    namespace.begin_apply(ps.AdamW())
    namespace.push({(0, 0): gradient(1.0)})
    with pytest.raises(ps.StepOutOfOrder, match=r"\(0, 0\) was pushed already since begin_apply"):
        namespace.push({(0, 1): gradient(1.0), (0, 0): gradient(1.0)})
    assert namespace.pending_count == 1
    assert (pending(daemon, (0, 0)) == 1.0).all()
    assert len(daemon.requests(m.Push)) == 1


def test_calls_out_of_order_are_refused_here(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    with pytest.raises(ps.StepOutOfOrder, match="no apply is open"):
        namespace.end_apply()
    namespace.begin_apply(ps.AdamW())
    for call in (namespace.begin_apply, namespace.apply):
        with pytest.raises(ps.StepOutOfOrder, match="call end_apply first"):
            call(ps.AdamW())
    assert daemon.requests(m.Apply) == []
    namespace.abort()
    assert namespace.apply(ps.AdamW()).wait()["records"] == 0


def test_a_refused_begin_is_told_by_the_next_push_and_then_nothing_is_open(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    daemon.fail(m.BeginApply, ps.StepPrepared("a step is prepared"))
    namespace.begin_apply(ps.AdamW())
    daemon.fail(m.Push, ps.StepOutOfOrder("no apply is open"))
    with pytest.raises(ps.StepPrepared, match="a step is prepared"):
        namespace.push({(0, 0): gradient(1.0)})
    assert not namespace.is_applying
    assert namespace.pending_count == 0
    namespace.push({(0, 0): gradient(1.0)})
    assert daemon.requests(m.Push)[-1].is_last is False


def test_a_refused_begin_is_told_by_end_apply(daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient) -> None:
    namespace.push({(0, 0): gradient(1.0)})
    daemon.fail(m.BeginApply, ps.StepPrepared("a step is prepared"))
    namespace.begin_apply(ps.AdamW())
    daemon.wait_for(m.BeginApply)
    namespace.steps()  # whatever is answered behind it
    with pytest.raises(ps.StepPrepared):
        namespace.end_apply()
    assert namespace.pending_count == 1


# --- room for more gradients


def keep_reading(daemon: FakeDaemon) -> list[m.AwaitRoom]:
    """The daemon has read what it is asked for, and asked to wait for: those requests, as they come."""
    asked: list[m.AwaitRoom] = []

    def answer(session: FakeSession, request: m.AwaitRoom) -> None:
        asked.append(request)
        session.send(m.Done(request.id, request.keys[:1] if request.timeout_s > 0 else []))

    daemon.script(m.AwaitRoom, answer)
    return asked


@pytest.fixture
def scarce(daemon: FakeDaemon, store: ps.Store) -> ps.Namespace:
    """A namespace of many tiny experts, with room for two of its three layers."""
    daemon.gradient_share_bytes = 2 << 20
    return store.create_namespace("scarce", ps.adamw_schema({"down": (4, 8)}), layers=3, experts=256)


def layer_of(layer: int) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    return {(layer, expert): {"down": torch.ones(4, 8, dtype=torch.bfloat16)} for expert in range(256)}


def test_a_push_waits_for_room_and_the_area_stays_within_its_share(daemon: FakeDaemon, scarce: ps.Namespace) -> None:
    asked = keep_reading(daemon)
    scarce.reserve_room()
    scarce.begin_apply(ps.AdamW())
    for layer in (2, 1):
        scarce.push(layer_of(layer))
    assert asked == []
    scarce.push({(0, 0): layer_of(0)[0, 0], (0, 1): layer_of(0)[0, 1]})
    assert [(request.timeout_s > 0, len(request.keys)) for request in asked] == [
        (False, 512), (True, 512), (False, 511), (True, 511)
    ]  # fmt: skip
    assert scarce._area.size_bytes == 2 << 20
    assert scarce.pending_count == 514, "what was read is pending until the apply is over"
    assert asked[0].keys[0] not in [entry[:2] for entry in daemon.requests(m.Push)[-1].entries]
    scarce.abort()
    assert scarce._area.free_bytes() == 2 << 20, "no range came back twice"
    assert scarce.pending_count == 0


def test_what_was_read_is_taken_again_before_the_area_grows(daemon: FakeDaemon, scarce: ps.Namespace) -> None:
    daemon.gradient_share_bytes = None
    scarce._pending.share_bytes = None
    daemon.script(m.AwaitRoom, lambda session, request: session.send(m.Done(request.id, request.keys)))
    scarce.begin_apply(ps.AdamW())
    for layer in (2, 1, 0):
        scarce.push(layer_of(layer))
    assert scarce._area.size_bytes == 2 << 20


def test_a_push_that_has_less_than_two_layers_room_does_not_wait(daemon: FakeDaemon, scarce: ps.Namespace) -> None:
    asked = keep_reading(daemon)
    scarce.push(layer_of(0))  # held by micro-batches before
    scarce.begin_apply(ps.AdamW())
    scarce.push(layer_of(2))
    before = scarce.pending_count
    with pytest.raises(ps.CapacityError, match="more than this rank's share of gradient_budget"):
        scarce.push(layer_of(1))
    assert scarce.pending_count == before
    assert [request for request in asked if request.timeout_s > 0] == []


def test_a_share_of_less_than_two_layers_is_refused_with_the_size_needed(daemon: FakeDaemon, store: ps.Store) -> None:
    daemon.gradient_share_bytes = (2 << 20) - 1
    namespace = store.create_namespace("tight", ps.adamw_schema({"down": (4, 8)}), layers=3, experts=256)
    with pytest.raises(ps.CapacityError, match="raise gradient_budget to 2097152 bytes"):
        namespace.reserve_room()
    assert namespace._area.size_bytes == 0
    one_layer = store.create_namespace("one", ps.adamw_schema({"down": (4, 8)}), layers=1, experts=256)
    one_layer.reserve_room()


def test_a_push_waits_once_for_all_its_room(daemon: FakeDaemon, scarce: ps.Namespace) -> None:
    clock = ManualClock()
    scarce._pending._clock = clock
    asked: list[float] = []

    def answer(session: FakeSession, request: m.AwaitRoom) -> None:
        if request.timeout_s:
            asked.append(request.timeout_s)
            clock.advance(2.0)
        session.send(m.Done(request.id, request.keys[:1] if request.timeout_s else []))

    daemon.script(m.AwaitRoom, answer)
    scarce.reserve_room()
    scarce.begin_apply(ps.AdamW())
    for layer in (2, 1):
        scarce.push(layer_of(layer))
    scarce.push({(0, expert): layer_of(0)[0, expert] for expert in range(4)})
    assert asked == pytest.approx([5.0, 3.0, 1.0, LEAST_WAIT_S])
    scarce.push({(0, 4): layer_of(0)[0, 4]})
    assert asked[-1] == 5.0


def test_handles_of_one_connection_leave_each_other_the_room_that_they_reserved(
    daemon: FakeDaemon, scarce: ps.Namespace, store: ps.Store
) -> None:
    asked = keep_reading(daemon)
    scarce.reserve_room()
    other = store.create_namespace("other", ps.adamw_schema({"down": (4, 8)}), layers=3, experts=256)
    with pytest.raises(ps.CapacityError, match=r"beside what other namespaces .* raise gradient_budget to 4194304 bytes"):
        other.reserve_room()
    scarce._pending.share_bytes = other._pending.share_bytes = 4 << 20
    other.reserve_room()
    for namespace in (scarce, other):
        namespace.begin_apply(ps.AdamW())
    for layer in (2, 1):
        scarce.push(layer_of(layer))
    scarce.push({(0, 0): layer_of(0)[0, 0]})
    assert [request.timeout_s > 0 for request in asked] == [False, True], "it waits for its own"
    for layer in (2, 1):
        other.push(layer_of(layer))
    assert len(asked) == 2, "there is room for these"
    assert scarce._area.size_bytes == 4 << 20
    for namespace in (scarce, other):
        namespace.abort()
    other.close()
    scarce._pending.share_bytes = 2 << 20
    scarce.reserve_room()
    assert scarce._area.tenants == [scarce._pending]


def test_room_is_reserved_by_a_writer_of_gradients_alone(store: ps.Store) -> None:
    fields = {"down": (4, 8)}
    store.create_namespace("trained", ps.adamw_schema(fields), layers=1, experts=4).commit(1).wait()
    served = store.create_namespace("served", ps.param_schema({"down": ((4, 8), "float32")}), layers=1, experts=4)
    with pytest.raises(ps.SchemaMismatch, match="'served' has no gradients: its schema is 'param'"):
        served.reserve_room()
    with pytest.raises(ps.SchemaMismatch, match="reserve_room: namespace 'trained' is open for reading"):
        store.open_namespace("trained").reserve_room()


def test_an_error_of_the_wait_is_the_pushs_and_changes_nothing(daemon: FakeDaemon, scarce: ps.Namespace) -> None:
    scarce.reserve_room()
    scarce.begin_apply(ps.AdamW())
    for layer in (2, 1):
        scarce.push(layer_of(layer))
    daemon.fail(m.AwaitRoom, ps.RankLost("rank 1 is gone"))
    with pytest.raises(ps.RankLost):
        scarce.push(layer_of(0))
    assert scarce.pending_count == 512
    assert len(daemon.requests(m.Push)) == 2


def test_end_layers_is_told(daemon: FakeDaemon, scarce: ps.Namespace) -> None:
    scarce.begin_apply(ps.AdamW())
    scarce.end_layers(range(1, 3))
    assert [request.layers for request in daemon.requests(m.EndLayers)] == [[1, 2]]


def test_a_daemon_of_minor_3_is_asked_for_no_room(daemon: FakeDaemon, scarce: ps.Namespace) -> None:
    scarce._connection.minor = 3
    scarce.begin_apply(ps.AdamW())
    scarce.end_layers([2])
    for layer in (2, 1):
        scarce.push(layer_of(layer))
    with pytest.raises(ps.CapacityError):
        scarce.push(layer_of(0))
    assert daemon.requests(m.AwaitRoom) == daemon.requests(m.EndLayers) == []


def test_an_older_daemon_opens_none(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.minor = 2
    namespace._connection.minor = 2
    with pytest.raises(ps.VersionMismatch):
        namespace.begin_apply(ps.AdamW())
