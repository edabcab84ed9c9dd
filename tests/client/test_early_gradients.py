"""Gradients for an apply that is open: the daemon is told of each key once, and calls out of order are refused here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import paramstore_client as ps
from paramstore.testing.fake_daemon import FakeDaemon
from paramstore.wire import messages as m

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


def test_an_older_daemon_opens_none(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.minor = 2
    namespace._connection.minor = 2
    with pytest.raises(ps.VersionMismatch):
        namespace.begin_apply(ps.AdamW())
