from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import paramstore_client as ps
from paramstore.wire import messages as m
from paramstore_testkit.wire.fake_daemon import FakeDaemon, FakeSession

Gradient = Callable[[float], dict[str, torch.Tensor]]


def pending(daemon: FakeDaemon, key: tuple[int, int]) -> torch.Tensor:
    """What the daemon would apply to `key`'s `down`."""
    return daemon.namespaces["moe"].gradient(key)["down"]


def test_one_push_is_one_message(daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient) -> None:
    namespace.push({(0, 0): gradient(1.0), (1, 3): gradient(2.0)})
    (push,) = daemon.requests(m.Push)
    assert [entry[:2] for entry in push.entries] == [(0, 0), (1, 3)]
    assert (pending(daemon, (1, 3)) == 2.0).all()


def test_second_push_of_a_key_adds_without_a_message(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    namespace.push({(0, 0): gradient(1.0)})
    namespace.push({(0, 0): gradient(0.5), (0, 1): gradient(4.0)})
    assert [len(push.entries) for push in daemon.requests(m.Push)] == [1, 1]
    assert (pending(daemon, (0, 0)) == 1.5).all()
    assert (pending(daemon, (0, 1)) == 4.0).all()


def test_sums_are_made_in_push_order_in_the_gradient_dtype(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    expected = torch.zeros((), dtype=torch.bfloat16)
    for value in (1.0, 0.00390625, 0.00390625, 256.0):
        expected = expected + torch.tensor(value, dtype=torch.bfloat16)
        namespace.push({(0, 0): gradient(value)})
    assert (pending(daemon, (0, 0)) == expected).all()


def test_pushed_tensors_may_change_afterwards(daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient) -> None:
    mine = gradient(1.0)
    namespace.push({(0, 0): mine})
    mine["down"].zero_()
    assert (pending(daemon, (0, 0)) == 1.0).all()


def test_apply_consumes_what_was_pushed(namespace: ps.Namespace, gradient: Gradient) -> None:
    namespace.push({(0, 1): gradient(1.0)})
    assert namespace.apply(ps.AdamW(lr=0.5), grad_scale=2.0).wait()["records"] == 1
    assert namespace.apply(ps.AdamW()).wait()["records"] == 0
    with namespace.acquire([(0, 1)]) as lease:
        assert (lease[0, 1]["down"] == 0.0).all()


def test_ranges_come_back_when_the_apply_is_answered(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    free_bytes = namespace._area.free_bytes
    before = free_bytes()
    daemon.hold(m.Apply)
    namespace.push({(0, 0): gradient(1.0)})
    ticket = namespace.apply(ps.AdamW())
    assert free_bytes() < before
    daemon.let_go(m.Apply)
    ticket.wait()
    assert free_bytes() == before


def initialize(namespace: ps.Namespace) -> None:
    namespace.initialize(lambda key: {"gate_up": torch.zeros(8, 4), "down": torch.zeros(4, 8)})


CONSUMERS: dict[str, tuple[type[m.Message], Callable[[ps.Namespace], object]]] = {
    "apply": (m.Apply, lambda namespace: namespace.apply(ps.AdamW()).wait()),
    "abort": (m.Abort, ps.Namespace.abort),
    "rollback": (m.Rollback, lambda namespace: namespace.rollback(1)),
    "initialize": (m.InitializeBegin, initialize),
    "close": (m.CloseNamespace, ps.Namespace.close),
}


@pytest.mark.parametrize("ends_it", CONSUMERS)
def test_ranges_come_back_whatever_ends_what_is_pending(namespace: ps.Namespace, gradient: Gradient, ends_it: str) -> None:
    before = namespace._area.free_bytes()
    namespace.push({(0, 0): gradient(1.0)})
    CONSUMERS[ends_it][1](namespace)
    assert namespace._area.free_bytes() == before
    assert len(namespace._pending) == 0


@pytest.mark.parametrize(
    ("ends_it", "error"),
    [
        ("apply", ps.StepFailed("half-way")), ("apply", ps.WriterFenced("no")), ("apply", ps.RankLost("no")),
        ("rollback", ps.WriterFenced("no")), ("abort", ps.RankLost("no")), ("close", ps.StepFailed("no")),
    ],
)  # fmt: skip
def test_ranges_come_back_where_the_daemon_keeps_nothing_that_can_be_applied(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient, ends_it: str, error: ps.ParamStoreError
) -> None:
    kind, call = CONSUMERS[ends_it]
    before = namespace._area.free_bytes()
    namespace.push({(0, 0): gradient(1.0)})
    daemon.fail(kind, error)
    with pytest.raises(type(error)):
        call(namespace)
    assert namespace._area.free_bytes() == before
    assert len(namespace._pending) == 0


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        ("apply", ps.StepPrepared("no")), ("apply", ps.ConfigError("no")), ("apply", ps.SchemaMismatch("no")),
        ("apply", ps.StepMismatch("no")), ("abort", ps.StepMismatch("no")), ("abort", ps.StepFailed("no")),
        ("rollback", ps.StepDropped("no")), ("rollback", ps.StepFailed("a snapshot")), ("rollback", ps.StepMismatch("no")),
        ("initialize", ps.StepOutOfOrder("no")), ("initialize", ps.StepMismatch("no")),
    ],
)  # fmt: skip
def test_a_refusal_leaves_all_pending_on_both_sides(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient, refused: str, error: ps.ParamStoreError
) -> None:
    kind, call = CONSUMERS[refused]
    before = namespace._area.free_bytes()
    namespace.push({(0, 0): gradient(1.0), (0, 1): gradient(2.0)})
    daemon.fail(kind, error)
    with pytest.raises(type(error)):
        call(namespace)
    assert len(namespace._pending) == 2
    namespace.push({(0, 0): gradient(4.0), (0, 2): gradient(8.0)})
    found = [pending(daemon, (0, expert)) for expert in range(3)]
    assert [value.unique().tolist() for value in found] == [[5.0], [2.0], [8.0]]
    assert [len(push.entries) for push in daemon.requests(m.Push)] == [2, 1], "a key that is pending is announced once"
    assert namespace.apply(ps.AdamW()).wait()["records"] == 3
    assert namespace._area.free_bytes() == before


def test_a_push_behind_a_refusal_that_nobody_has_read_adds_to_what_is_pending(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    before = namespace._area.free_bytes()
    namespace.push({(0, 0): gradient(1.0)})
    daemon.fail(m.Apply, ps.StepPrepared("no"))
    ticket = namespace.apply(ps.AdamW())
    namespace.push({(0, 0): gradient(2.0), (0, 1): gradient(4.0)})
    with pytest.raises(ps.StepPrepared):
        ticket.wait()
    assert [pending(daemon, (0, expert)).unique().tolist() for expert in range(2)] == [[3.0], [4.0]]
    assert namespace.abort() == 2
    assert namespace._area.free_bytes() == before


@pytest.mark.parametrize("wait_timeout_s", [5.0, 1e10])  # the second may be configured, though no argument may be so long
def test_a_push_that_overtakes_the_answer_of_a_refused_apply_waits_for_it(
    wait_timeout_s: float, daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a daemon may answer that serves several ranks: the push first."""
    namespace.wait_timeout_s = wait_timeout_s
    namespace.push({(0, 0): gradient(1.0)})
    unanswered: list[tuple[FakeSession, m.Apply]] = []
    daemon.script(m.Apply, lambda session, request: unanswered.append((session, request)))
    ticket = namespace.apply(ps.AdamW())
    settled_within = ps.Ticket.settled_within

    def answered_at_last(waiting: ps.Ticket[object], *timeout_s: float) -> bool:
        session, request = unanswered.pop()
        session.send(m.Failed(request.id, "StepPrepared", "no"))
        return settled_within(waiting, *timeout_s)

    monkeypatch.setattr(ps.Ticket, "settled_within", answered_at_last)
    namespace.push({(0, 0): gradient(2.0)})
    assert pending(daemon, (0, 0)).unique().tolist() == [3.0]
    with pytest.raises(ps.StepPrepared):
        ticket.wait()


def test_what_a_refused_apply_leaves_goes_with_the_next_one_even_if_that_was_sent_before_the_answer(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    before = namespace._area.free_bytes()
    namespace.push({(0, 0): gradient(1.0)})
    daemon.fail(m.Apply, ps.ConfigError("no"))
    first, second = namespace.apply(ps.AdamW()), namespace.apply(ps.AdamW())
    assert second.wait()["records"] == 1
    with pytest.raises(ps.ConfigError):
        first.wait()
    assert len(namespace._pending) == 0
    assert namespace._area.free_bytes() == before


def test_a_push_that_no_refusal_explains_fails_with_its_own_error(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    before = namespace._area.free_bytes()
    daemon.fail(m.Push, ps.ProtocolError("a bug"))
    with pytest.raises(ps.ProtocolError, match="a bug"):
        namespace.push({(0, 0): gradient(1.0)})
    assert len(daemon.requests(m.Push)) == 1
    assert namespace._area.free_bytes() == before


def test_push_after_an_unanswered_apply_starts_a_new_sum(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    daemon.hold(m.Apply)
    namespace.push({(0, 0): gradient(1.0)})
    ticket = namespace.apply(ps.AdamW())
    daemon.hold(m.Push)
    pushing = threading.Thread(target=namespace.push, args=({(0, 0): gradient(8.0)},))
    pushing.start()
    daemon.wait_for(m.Push, 2)
    daemon.let_go(m.Apply)  # handles the push too, in order
    pushing.join(timeout=5)
    ticket.wait()
    assert (pending(daemon, (0, 0)) == 8.0).all()


def test_abort_says_how_many_keys_had_gradients(namespace: ps.Namespace, gradient: Gradient) -> None:
    namespace.push({(0, 0): gradient(1.0), (0, 1): gradient(1.0)})
    assert namespace.abort() == 2
    assert namespace.abort() == 0


def test_gradient_norm_is_over_everything_pending(namespace: ps.Namespace, gradient: Gradient) -> None:
    assert namespace.gradient_norm() == 0.0
    namespace.push({(0, 0): gradient(1.0), (0, 1): gradient(2.0)})
    assert namespace.gradient_norm() == pytest.approx((64 * 1.0 + 64 * 4.0) ** 0.5)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({(0, 9): {"gate_up": torch.zeros(8, 4), "down": torch.zeros(4, 8)}}, ps.UnknownKey, r"\(0, 9\)"),
        ({(0, 1): {"gate_up": torch.zeros(8, 4)}}, ps.SchemaMismatch, r"\(0, 1\): missing 'down': .*gate_up, down"),
        ({(0, 1): {"up": 1, "gate_up": 2}}, ps.SchemaMismatch, r"\(0, 1\): missing 'down'; unknown 'up': "),
        (
            {(0, 1): {"gate_up": torch.zeros(4, 8, dtype=torch.bfloat16), "down": torch.zeros(4, 8, dtype=torch.bfloat16)}},
            ps.SchemaMismatch, r"'gate_up': shape \(4, 8\), the schema has \(8, 4\)",
        ),
        ({(0, 1): {"gate_up": torch.zeros(8, 4), "down": torch.zeros(4, 8)}}, ps.SchemaMismatch, "float32.*takes bfloat16"),
        ({(0, 1): {"gate_up": [1.0], "down": [1.0]}}, ps.SchemaMismatch, "a list is no tensor"),
    ],
)  # fmt: skip
def test_push_that_is_refused_changes_nothing(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient, wrong: dict[tuple[int, int], dict[str, torch.Tensor]],
    error: type[Exception], message: str,
) -> None:  # fmt: skip
    namespace.push({(0, 0): gradient(1.0)})
    before = namespace._area.free_bytes()
    with pytest.raises(error, match=message):
        namespace.push({(0, 0): gradient(1.0), **wrong})
    assert (pending(daemon, (0, 0)) == 1.0).all()
    assert len(daemon.requests(m.Push)) == 1
    assert namespace._area.free_bytes() == before


def test_push_that_the_daemon_refuses_changes_nothing(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    namespace.push({(0, 0): gradient(1.0)})
    before = namespace._area.free_bytes()
    daemon.fail(m.Push, ps.WriterFenced("another writer opened 'moe'"))
    with pytest.raises(ps.WriterFenced):
        namespace.push({(0, 0): gradient(1.0), (0, 1): gradient(1.0)})
    assert (pending(daemon, (0, 0)) == 1.0).all()
    assert namespace._area.free_bytes() == before


def test_push_over_the_gradient_budget_changes_nothing(
    daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace
) -> None:
    large = store.create_namespace("large", ps.adamw_schema({"w": (1024, 1024)}), layers=1, experts=8)
    daemon.upload_budget_bytes = daemon.upload_bytes + (2 << 20)
    value = {"w": torch.ones(1024, 1024, dtype=torch.bfloat16)}
    large.push({(0, 0): value})
    with pytest.raises(ps.CapacityError, match="--gradient-budget"):
        large.push({(0, 0): value, (0, 1): value, (0, 2): value})
    assert (daemon.namespaces["large"].gradient((0, 0))["w"] == 1.0).all()


def test_push_over_the_budget_waits_for_an_apply_under_way(daemon: FakeDaemon, store: ps.Store) -> None:
    large = store.create_namespace("large", ps.adamw_schema({"w": (1024, 1024)}), layers=1, experts=8)
    daemon.upload_budget_bytes = 2 << 20
    value = {"w": torch.ones(1024, 1024, dtype=torch.bfloat16)}
    daemon.script(m.Apply, lambda session, request: session.send(m.Done(request.id, {"records": 1})))
    large.push({(0, 0): value})
    ticket = large.apply(ps.AdamW())
    large.push({(0, 1): value})
    assert ticket.is_settled


def test_wider_gradients_take_the_param_dtype_too(daemon: FakeDaemon, store: ps.Store) -> None:
    schema = ps.adamw_schema({"down": (2, 2)}, gradient_dtype=torch.float32)
    wide = store.create_namespace("wide", schema, layers=1, experts=1)
    wide.push({(0, 0): {"down": torch.full((2, 2), 1.0, dtype=torch.bfloat16)}})
    wide.push({(0, 0): {"down": torch.full((2, 2), 2.0**-20)}})
    assert (daemon.namespaces["wide"].gradient((0, 0))["down"] == 1.0 + 2.0**-20).all()


def test_gradients_of_an_inference_namespace_are_refused(store: ps.Store) -> None:
    frozen = store.create_namespace("frozen", ps.param_schema({"w": ((2,), "uint8")}), layers=1, experts=1)
    with pytest.raises(ps.SchemaMismatch, match="no gradients"):
        frozen.push({(0, 0): {"w": torch.zeros(2, dtype=torch.uint8)}})


def test_threads_that_push_the_same_key_lose_nothing(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient
) -> None:
    def run() -> None:
        for _ in range(10):
            namespace.push({(0, 0): gradient(1.0)})

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert (pending(daemon, (0, 0)) == 40.0).all()
    assert len(daemon.requests(m.Push)) == 1


def test_gradients_go_with_an_apply_that_the_daemon_is_slow_to_take(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Gradient, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace.push({(0, 0): gradient(1.0)})
    connection, send = namespace._connection, namespace._connection.request

    def late(*arguments: object, **options: object) -> object:
        send(*arguments, **options)  # it is in the outbox
        raise ps.WaitTimeout("the daemon took nothing off its socket")

    monkeypatch.setattr(connection, "request", late)
    with pytest.raises(ps.WaitTimeout):
        namespace.apply(ps.AdamW())
    monkeypatch.undo()
    namespace.push({(0, 0): gradient(2.0)})
    assert [len(push.entries) for push in daemon.requests(m.Push)] == [1, 1]  # not added to what the apply has consumed


# --- while an apply is open
