"""What a handle sends about where experts are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import paramstore_client as ps
from paramstore.core.visits import ring_visits
from paramstore.wire import messages as m
from paramstore_testkit.wire.fake_daemon import FakeDaemon

Gradient = Callable[[float], dict[str, torch.Tensor]]
KEYS = [(0, 0), (1, 1)]


def test_a_declared_schedule_is_that_of_a_step_for_a_writer(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    namespace.declare_schedule()
    namespace.declare_schedule(micro_batches=2)
    namespace.declare_schedule(ring_visits([1, 0]))
    namespace.declare_schedule((), ())
    one, two, ring, none = daemon.requests(m.DeclareSchedule)
    assert one.param_visits == ((0, "routed"), (1, "routed"), (1, "repeated"), (0, "repeated"), (1, "updated"), (0, "updated"))
    assert one.optim_visits == ((1, "gathered"), (0, "gathered"))
    assert (len(two.param_visits), two.optim_visits) == (10, one.optim_visits)
    assert (ring.param_visits, ring.optim_visits) == (((1, "routed"), (0, "routed")), ())
    assert (none.param_visits, none.optim_visits) == ((), ())


def test_a_declared_schedule_is_a_ring_for_a_reader(daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace) -> None:
    namespace.commit(0).wait()
    with store.open_namespace("moe") as reader:
        reader.declare_schedule()
    (ring,) = daemon.requests(m.DeclareSchedule)
    assert (ring.param_visits, ring.optim_visits) == (((0, "routed"), (1, "routed")), ())


def test_an_older_daemon_takes_no_schedule(daemon: FakeDaemon) -> None:
    daemon.minor = m.TRAINING_MINOR - 1
    with ps.connect(daemon.path, timeout_s=5.0) as store:
        handle = store.create_namespace("old", ps.adamw_schema({"w": (4,)}), layers=1, experts=2)
        with pytest.raises(ps.VersionMismatch, match="declare_schedule"):
            handle.declare_schedule()


def test_wishes_and_moves_name_their_keys(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    namespace.protect(KEYS)
    namespace.unprotect(KEYS)
    namespace.write_back().wait()
    namespace.evict(KEYS, "param").wait()
    namespace.prefetch(KEYS, deadline_s=0.5).wait()
    assert [(wish.keys, wish.is_wanted) for wish in daemon.requests(m.Protect)] == [(KEYS, True), (KEYS, False)]
    assert daemon.requests(m.WriteBack)[0].keys is None
    assert (daemon.requests(m.Evict)[0].keys, daemon.requests(m.Evict)[0].part) == (KEYS, "param")
    assert daemon.requests(m.Prefetch)[0].deadline_s == 0.5


def test_device_reports_are_one_way(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    namespace.report_device(resident=KEYS, touched=KEYS[:1], bytes_resident=4096)
    (report,) = daemon.wait_for(m.DeviceReport)
    assert (report.resident, report.touched, report.bytes_resident) == (KEYS, KEYS[:1], 4096)
    assert namespace.residency()["experts"] == 4


def test_leased_memory_is_told_before_it_is_unmapped(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    told: list[int] = []
    stop = namespace.before_unmap(lambda address, length_bytes: told.append(length_bytes))
    namespace.acquire(KEYS).release()
    daemon.ask_back([daemon.namespaces["moe"].arena])
    namespace.steps()
    daemon.wait_for(m.Unmapped)
    assert told == [2 << 20]
    stop()
