from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from itertools import count

import msgspec
import numpy
import pytest
import torch

import paramstore_client as ps
from paramstore.wire import messages as m
from paramstore.wire.codec import LENGTH, encode
from paramstore_client.namespace import close_when_dropped
from paramstore_testkit.interrupts import InterruptAtPoint
from paramstore_testkit.wire.fake_daemon import STORE_UUID, FakeDaemon, FakeSession

Gradient = Callable[[float], dict[str, torch.Tensor]]
KEYS = [(0, 0), (1, 1)]
REFRESH = "paramstore_client/namespace.py", "handle/base.py", "handle/steps.py", "connection/ticket.py", "/shared_socket.py"
"""Code in which a refresh is interrupted."""


def test_handle_says_what_was_opened(namespace: ps.Namespace) -> None:
    assert (namespace.name, namespace.layers, namespace.experts) == ("moe", (0, 1), 4)
    assert namespace.schema == ps.adamw_schema({"gate_up": (8, 4), "down": (4, 8)})
    assert (namespace.committed_step, namespace.view_step, namespace.epoch) == (None, None, 1)
    assert namespace.lease_slots == 16
    assert namespace.keys() == [(layer, expert) for layer in range(2) for expert in range(4)]


def test_acquire_sends_the_timeout_and_waits_a_little_longer(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    namespace.acquire(KEYS, timeout_s=2.5).release()
    namespace.acquire(KEYS).release()
    assert [request.timeout_s for request in daemon.requests(m.Acquire)] == [2.5, daemon.wait_timeout_s]
    assert namespace.begin_acquire(KEYS, timeout_s=2.5).timeout_s == 3.5


def test_acquire_passes_on_what_the_daemon_says_of_its_deadline(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.fail(m.Acquire, ps.WaitTimeout("slots are held by session 3"))
    with pytest.raises(ps.WaitTimeout, match="session 3"):
        namespace.acquire(KEYS, timeout_s=0.0)


def test_acquire_above_the_cap_is_refused_by_the_daemon_who_knows_how_many_share_the_slots(
    daemon: FakeDaemon, namespace: ps.Namespace
) -> None:
    with pytest.raises(ps.CapacityError, match=r"17 keys.*may lease 16 slots"):
        namespace.acquire([(0, 0)] * 17)
    assert len(daemon.requests(m.Acquire)) == 1
    assert daemon.lease_count == 0


def test_acquire_of_an_unknown_part_is_refused(namespace: ps.Namespace) -> None:
    with pytest.raises(ps.SchemaMismatch, match="moments"):
        namespace.acquire(KEYS, "moments")


@pytest.mark.slow
def test_lease_that_comes_after_its_wait_was_given_up_is_released(
    daemon: FakeDaemon, namespace: ps.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramstore_client.handle.base.ANSWER_GRACE_S", 0.01)
    held: list[m.Acquire] = []
    daemon.script(m.Acquire, lambda session, request: held.append(request))
    with pytest.raises(ps.WaitTimeout):
        namespace.acquire(KEYS, timeout_s=0.0)
    (cancel,) = daemon.wait_for(m.Cancel)
    assert cancel.target == held[0].id
    (session,) = daemon.sessions
    daemon._handle(session, held[0])
    namespace.steps()
    releases = daemon.wait_for(m.Release, 2)  # when it was given up, and when it came
    assert [release.leases for release in releases] == [[held[0].id]] * 2
    daemon.wait_until(lambda: daemon.lease_count == 0)


def test_grant_of_another_length_is_a_protocol_error(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    def grant_one(session: FakeSession, request: m.Acquire) -> None:
        daemon._handle(session, m.Acquire(request.id, request.handle, request.keys[:1], request.part, 1.0))

    daemon.script(m.Acquire, grant_one)
    with pytest.raises(ps.ProtocolError, match="2 keys"):
        namespace.acquire(KEYS)


def test_lease_slots_follow_a_daemon_that_promises_none(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.sessions[-1].send(m.LeaseSlots(namespace._handle, 7))
    namespace.prefetch(KEYS).wait()
    assert namespace.lease_slots == 7
    assert repr(namespace).endswith("7 lease slots>")


def test_keys_may_be_counted_with_numpy_and_not_with_elements_of_tensors(namespace: ps.Namespace) -> None:
    with namespace.acquire([(numpy.int64(0), expert) for expert in numpy.array([2, 3])]) as lease:
        assert lease.keys() == [(0, 2), (0, 3)]
    for wrong in ((0, torch.tensor(2)), (True, 2), (torch.tensor(True), 2), (0, torch.tensor(2, device="meta"))):
        with pytest.raises(ps.ConfigError, match=r"^keys=\[\(0, 1\), .*: give \(layer, expert\) pairs of whole numbers"):
            namespace.acquire([(0, 1), wrong])


def test_keys_that_are_no_pairs_are_refused(namespace: ps.Namespace) -> None:
    with pytest.raises(ps.ConfigError, match="pairs"):
        namespace.acquire([1, 2])  # type: ignore[list-item]


def test_segments_asked_back_are_acknowledged_when_their_leases_end(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    lease = namespace.acquire(KEYS)
    used = sorted({slot[0] for slot in lease._slots})
    daemon.ask_back(used)
    namespace.steps()
    assert daemon.requests(m.Unmapped) == []
    assert (lease[1, 1]["down"] == 17).all()
    lease.release()
    (unmapped,) = daemon.wait_for(m.Unmapped)
    assert unmapped.segments == used
    with namespace.acquire(KEYS) as again:
        assert (again[1, 1]["down"] == 17).all()
        assert not {slot[0] for slot in again._slots} & set(used)


def test_segments_asked_back_without_leases_are_acknowledged_at_once(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    lease = namespace.acquire(KEYS)
    used = sorted({slot[0] for slot in lease._slots})
    lease.release()
    namespace.steps()
    daemon.ask_back(used)
    namespace.steps()
    assert daemon.wait_for(m.Unmapped)[0].segments == used


def test_read_returns_copies_of_every_stored_field_and_the_params(namespace: ps.Namespace) -> None:
    record = namespace.read((1, 2))
    assert set(record) == {
        f"{prefix}{name}" for prefix in ("", "master/", "exp_avg/", "exp_avg_sq/") for name in ("gate_up", "down")
    }
    assert (record["master/down"] == 18).all()
    assert record["master/down"].dtype == torch.float32
    assert record["down"].dtype == torch.bfloat16
    assert (record["exp_avg/gate_up"] == 0).all()


def test_read_of_an_inference_record_has_its_own_dtype(store: ps.Store) -> None:
    frozen = store.create_namespace("frozen", ps.param_schema({"w": ((3,), "uint8")}), layers=1, experts=1)
    frozen.initialize(lambda key: {"w": torch.tensor([1, 2, 3], dtype=torch.uint8)})
    assert frozen.read((0, 0))["w"].tolist() == [1, 2, 3]
    with frozen.acquire([(0, 0)]) as lease:
        assert lease[0, 0]["w"].tolist() == [1, 2, 3]


def test_read_of_a_key_outside_is_refused(namespace: ps.Namespace) -> None:
    with pytest.raises(ps.UnknownKey, match=r"\(2, 0\)"):
        namespace.read((2, 0))


def test_failed_read_gives_its_range_back(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    namespace.read((0, 0))
    before = namespace._area.free_bytes()
    daemon.fail(m.Read, ps.CorruptRecord("key (0, 0): chunk 3"))
    with pytest.raises(ps.CorruptRecord):
        namespace.read((0, 0))
    assert namespace._area.free_bytes() == before


def test_commit_moves_the_committed_step(namespace: ps.Namespace) -> None:
    assert namespace.commit(3, extra=b"rng").wait()["step"] == 3
    namespace.commit(7).wait()
    assert namespace.committed_step == 7
    assert namespace.steps() == [3, 7]
    assert namespace.extra(3) == b"rng"
    with pytest.raises(ps.StepOutOfOrder):
        namespace.commit(5).wait()
    assert namespace.committed_step == 7


def test_step_that_is_no_whole_number_is_refused_and_the_session_goes_on(namespace: ps.Namespace) -> None:
    for call in (
        namespace.commit, namespace.prepare, namespace.finalize, namespace.rollback, namespace.extra, namespace.snapshot,
        namespace.drop_snapshot,
    ):  # fmt: skip
        for wrong in (1.5, True, torch.tensor(3), torch.zeros((), device="meta", dtype=torch.int64)):
            with pytest.raises(ps.ConfigError, match="whole number"):
                call(wrong)
    namespace.commit(numpy.int64(3)).wait()  # type: ignore[arg-type]
    assert namespace.committed_step == 3
    assert type(namespace.committed_step) is int


def test_a_prepared_step_is_the_committed_one_once_it_is_finalized(store: ps.Store, namespace: ps.Namespace) -> None:
    namespace.commit(3).wait()
    assert namespace.prepare(4, extra=b"rng").wait()["step"] == 4
    assert namespace.committed_step == 3
    assert store.namespaces()[0]["prepared_step"] == 4
    with pytest.raises(ps.StepOutOfOrder):
        namespace.finalize(5).wait()
    namespace.finalize(4).wait()
    assert namespace.committed_step == 4
    assert namespace.extra(4) == b"rng"


def test_the_least_that_may_be_leased_is_asked_for_and_an_older_daemon_cannot_promise_it(
    daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace
) -> None:
    store.open_namespace("moe", min_lease_slots=3)
    store.open_namespace("moe", "write", rank=0, world_size=2, group="g", min_lease_slots=2)
    namespace.reader(min_lease_slots=4)
    assert [request.min_lease_slots for request in daemon.requests(m.OpenNamespace)] == [3, 4]
    assert [request.min_lease_slots for request in daemon.requests(m.OpenRank)] == [2]
    for wrong in (-1, 1.5, "3", None):
        with pytest.raises(ps.ConfigError, match=r"min_lease_slots=.*: give a whole number from 0"):
            store.open_namespace("moe", min_lease_slots=wrong)
    assert "16 lease slots" in repr(namespace)
    daemon.minor = m.PROMISE_MINOR - 1
    store.reconnect()
    with pytest.raises(ps.VersionMismatch, match=r"needs 1\.4"):
        store.open_namespace("moe", min_lease_slots=1)
    assert store.open_namespace("moe").lease_slots == 16


def test_the_most_that_is_to_be_promised_is_asked_for_and_an_older_daemon_is_told_of_none(
    daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace
) -> None:
    store.open_namespace("moe", max_lease_slots=3)
    store.open_namespace("moe", min_lease_slots=2, max_lease_slots=2)
    namespace.reader(max_lease_slots=0)
    assert [request.max_lease_slots for request in daemon.requests(m.OpenNamespace)] == [3, 2, 0]
    for wrong in (-1, 1.5, "3"):
        with pytest.raises(ps.ConfigError, match=r"max_lease_slots=.*: give a whole number from 0"):
            store.open_namespace("moe", max_lease_slots=wrong)
    with pytest.raises(ps.ConfigError, match=r"max_lease_slots=3: .* not below min_lease_slots=4"):
        namespace.reader(min_lease_slots=4, max_lease_slots=3)
    with pytest.raises(ps.ConfigError, match="max_lease_slots=3: give it for mode='read' alone"):
        store.open_namespace("moe", mode="write", max_lease_slots=3)
    daemon.minor = m.BOUND_MINOR - 1
    store.reconnect()
    store.open_namespace("moe", max_lease_slots=3)
    assert daemon.requests(m.OpenNamespace)[-1].max_lease_slots is None


def test_an_older_daemon_is_asked_for_neither_half_of_a_commit(
    daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace
) -> None:
    daemon.minor = m.PREPARE_MINOR - 1
    store.reconnect()
    namespace = store.open_namespace("moe", mode="write")
    calls = (
        lambda: namespace.prepare(1), lambda: namespace.finalize(1), lambda: store.open_namespace("moe", mode="write", at=1),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ps.VersionMismatch, match=r"speaks protocol 1\.1, .* needs 1\.2"):
            call()
    assert not daemon.requests(m.Prepare)
    assert not daemon.requests(m.Finalize)


def test_extra_above_the_limit_is_refused_without_a_message(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    for call in (namespace.commit, namespace.prepare):
        with pytest.raises(ps.CapacityError, match="65537 bytes"):
            call(1, extra=bytes((64 << 10) + 1))
    assert daemon.requests(m.Commit) == daemon.requests(m.Prepare) == []


def test_reader_moves_by_refresh_only(store: ps.Store, namespace: ps.Namespace) -> None:
    namespace.commit(1).wait()
    reader = store.open_namespace("moe")
    namespace.commit(2).wait()
    assert (reader.view_step, reader.committed_step) == (1, 1)
    assert reader.refresh() == 2
    assert (reader.view_step, reader.committed_step) == (2, 2)


@pytest.mark.slow
def test_a_refresh_that_is_interrupted_anywhere_leaves_no_step_that_the_daemon_has_moved_from(
    daemon: FakeDaemon, namespace: ps.Namespace
) -> None:
    namespace.commit(0).wait()
    for point in count(1):
        sent_count = len(daemon.requests(m.Refresh))
        with namespace.reader() as reader:
            namespace.commit(point).wait()
            with InterruptAtPoint(point, REFRESH) as interrupt:
                reader.refresh()
            reader.prefetch(KEYS).wait()  # takes in what the daemon has said so far
            step = point if len(daemon.requests(m.Refresh)) > sent_count else point - 1
            assert (reader.view_step, reader.committed_step) == (step, step), interrupt.place
        if not interrupt.is_raised:
            break
    assert point > 20


def test_close_ends_the_handle_and_its_leases(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    lease = namespace.acquire(KEYS)
    namespace.close()
    namespace.close()
    with pytest.raises(ps.LeaseError):
        lease[0, 0]
    with pytest.raises(ps.UnknownNamespace, match="closed"):
        namespace.steps()
    daemon.wait_until(lambda: daemon.lease_count == 0)


def test_close_after_the_daemon_died_is_quiet(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.stop()
    with pytest.raises(ps.StoreUnavailable):
        namespace.steps()
    with namespace:
        pass


def test_acquire_that_is_interrupted_leaks_no_lease(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    daemon.hold(m.Acquire)
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            namespace.acquire(KEYS, timeout_s=60.0)
        except ps.TicketCancelled as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    (request,) = daemon.wait_for(m.Acquire)
    namespace._connection.post(m.Cancel(request.id))
    thread.join(timeout=5)
    assert len(outcome) == 1
    assert daemon.lease_count == 0


def test_view_change_count_grows_with_what_may_change_bytes_and_with_nothing_else(
    namespace: ps.Namespace, values: Callable[[tuple[int, int]], dict[str, torch.Tensor]], gradient: Gradient
) -> None:
    counts = [namespace.view_change_count]

    def is_changed_by(call: Callable[[], object]) -> bool:
        call()
        counts.append(namespace.view_change_count)
        assert counts[-1] >= counts[-2]
        return counts[-1] > counts[-2]

    def lease() -> None:
        with namespace.acquire(KEYS):
            pass

    assert not is_changed_by(lambda: namespace.push({KEYS[0]: gradient(1.0)}))
    assert is_changed_by(lambda: namespace.apply(ps.AdamW(lr=0.1)))
    assert not is_changed_by(lambda: namespace.commit(1).wait())
    assert is_changed_by(lambda: namespace.rollback(1))
    assert is_changed_by(namespace.refresh)
    assert is_changed_by(lambda: namespace.initialize(values))
    for call in (lease, namespace.steps, namespace.abort, lambda: namespace.evict().wait(), lambda: namespace.read(KEYS[0])):
        assert not is_changed_by(call)


def test_view_change_count_grows_even_when_the_answer_is_an_error(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    for kind, call in ((m.Apply, lambda: namespace.apply(ps.AdamW(lr=0.1)).wait()), (m.Refresh, namespace.refresh)):
        before = namespace.view_change_count
        daemon.fail(kind, ps.StepFailed("half-way"))
        with pytest.raises(ps.StepFailed):
            call()
        assert namespace.view_change_count > before


def reader_to_drop(store: ps.Store, namespace: ps.Namespace) -> ps.Namespace:
    """A reader's handle that is closed once nobody has it. namespace: its writer, which has something for it."""
    if namespace.committed_step is None:
        namespace.commit(0).wait()
    reader = store.open_namespace("moe")
    close_when_dropped(reader)
    return reader


def test_a_handle_that_nobody_has_is_closed_once_its_last_lease_has_gone(
    daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace
) -> None:
    reader = reader_to_drop(store, namespace)
    handle = reader._handle
    lease = reader.acquire(KEYS)
    del reader
    gc.collect()
    assert (lease[KEYS[0]]["gate_up"] == 0).all()
    assert namespace.steps() == [0]
    assert not daemon.requests(m.CloseNamespace), "the lease is in use"
    lease.release()
    del lease
    assert [request.handle for request in daemon.wait_for(m.CloseNamespace)] == [handle]
    assert namespace.steps() == [0], "the answer ends nothing"


@pytest.mark.slow
def test_a_handle_stays_open_for_tensors_of_a_lease_that_was_dropped(
    daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace
) -> None:
    reader = reader_to_drop(store, namespace)
    weight = reader.acquire(KEYS)[KEYS[1]]["gate_up"]
    del reader
    gc.collect()
    assert namespace.steps() == [0]
    assert not daemon.requests(m.CloseNamespace)
    assert (weight == 17).all()


def test_a_handle_that_was_closed_is_not_closed_again_when_it_is_dropped(
    daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace
) -> None:
    for ends in (True, False):
        reader = reader_to_drop(store, namespace)
        close_when_dropped(reader)
        if ends:
            reader.close()
        del reader
        gc.collect()
    assert namespace.steps() == [0]
    assert len(daemon.requests(m.CloseNamespace)) == 2


def test_it_knows_its_store(namespace: ps.Namespace) -> None:
    assert namespace.store_uuid == STORE_UUID


def test_uncommitted_applies_are_those_that_no_settled_commit_covers(namespace: ps.Namespace) -> None:
    namespace.commit(0).wait()
    for _ in range(2):
        namespace.apply(ps.AdamW())
    covering = namespace.commit(1)
    namespace.apply(ps.AdamW())
    covering.wait()
    assert namespace.uncommitted_applies == 1
    namespace.rollback(1)
    assert namespace.uncommitted_applies == 0
    namespace.apply(ps.AdamW())
    namespace.prepare(2).wait()
    assert namespace.uncommitted_applies == 1
    namespace.finalize(2).wait()
    assert namespace.uncommitted_applies == 0


@pytest.mark.parametrize("options", [{"updates": "exact"}, {"state_dtype": "bfloat16"}])
def test_an_older_daemon_is_not_asked_for_a_schema_that_it_would_take_for_another(
    daemon: FakeDaemon, options: dict[str, str]
) -> None:
    daemon.minor = m.TRAINING_MINOR - 1
    with ps.connect(daemon.path, timeout_s=5.0) as store:
        with pytest.raises(ps.VersionMismatch, match=r"create_namespace\(updates='.*', state_dtype='.*'\) needs 1\.3"):
            store.create_namespace("old", ps.adamw_schema({"w": (4,)}, **options), layers=1, experts=2)  # type: ignore[arg-type]
        assert not daemon.requests(m.CreateNamespace)
        store.create_namespace("old", ps.adamw_schema({"w": (4,)}), layers=1, experts=2)


def test_an_older_daemon_understands_the_beginning_of_an_initialization() -> None:
    assert msgspec.msgpack.decode(encode(m.InitializeBegin(1, 2))[LENGTH.size :]) == ["init_begin", 1, 2]
