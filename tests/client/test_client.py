from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore.config import Config
from paramstore.wire import messages as m
from paramstore_client.connection.shared_socket import Connection
from paramstore_testkit.wire.fake_daemon import FakeDaemon

SCHEMA = ps.param_schema({"w": ((4,), "float32")})


@pytest.fixture(autouse=True)
def _no_garbage_of_others() -> None:
    """Tests here look at what is logged of tickets that nobody waited for: those of tests before are dropped now."""
    gc.collect()


def test_connect_says_hello_first(daemon: FakeDaemon, store: ps.Store) -> None:
    hello = daemon.received[0]
    assert isinstance(hello, m.Hello)
    assert (hello.magic, hello.major, hello.minor) == (m.MAGIC, m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR)
    assert store.address == f"unix://{daemon.path}"
    assert store.wait_timeout_s == daemon.wait_timeout_s


def test_address_comes_from_the_environment(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMSTORE_ADDRESS", f"unix://{daemon.path}")
    with ps.connect() as store:
        assert store.namespaces() == []


def test_no_daemon_is_said_at_once_with_the_way_on(tmp_path: Path) -> None:
    with pytest.raises(ps.StoreUnavailable, match=r"no daemon listens.*paramstore serve"):
        ps.connect(tmp_path / "nobody.sock")


def test_other_protocol_version_is_a_version_mismatch(daemon: FakeDaemon) -> None:
    daemon.fail(m.Hello, ps.VersionMismatch("the daemon speaks 2.0, the client 1.0"))
    with pytest.raises(ps.VersionMismatch, match=r"2\.0"):
        ps.connect(daemon.path)


@pytest.mark.slow
def test_daemon_that_does_not_answer_the_hello_is_not_waited_for_without_end(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.hold(m.Hello)
    with pytest.raises(ps.StoreUnavailable, match=r"did not answer the hello within 0\.05 s"):
        ps.connect(daemon.path, timeout_s=0.05)
    gc.collect()
    assert "nobody waited" not in caplog.text


def test_interrupted_hello_is_not_logged_as_one_that_nobody_waited_for(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(*args: object) -> bool:
        raise KeyboardInterrupt

    daemon.hold(m.Hello)
    monkeypatch.setattr(Connection, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ps.connect(daemon.path)
    gc.collect()
    assert "nobody waited" not in caplog.text


@pytest.mark.slow
def test_what_an_error_in_the_with_block_ends_is_not_logged_beside_it(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.hold(m.Commit)
    def interrupted() -> None:
        with ps.connect(daemon.path) as store:
            store.create_namespace("moe", SCHEMA, layers=1, experts=2).commit(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    gc.collect()
    assert "nobody waited" not in caplog.text
    with ps.connect(daemon.path) as store:
        store.open_namespace("moe", mode="write").commit(1)
    gc.collect()
    assert "commit 1 on 'moe' failed and nobody waited for it" in caplog.text  # the caller's own mistake is told


def test_prefetch_that_closing_the_store_ends_is_not_logged(daemon: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    daemon.hold(m.Prefetch)
    with ps.connect(daemon.path) as store:
        store.create_namespace("moe", SCHEMA, layers=1, experts=2).prefetch([(0, 0)])
    gc.collect()
    assert "nobody waited" not in caplog.text


def test_welcome_without_a_timeout_leaves_the_default(daemon: FakeDaemon) -> None:
    daemon.script(m.Hello, lambda session, request: session.send(m.Done(request.id, {})))
    with ps.connect(daemon.path) as store:
        assert store.wait_timeout_s == Config().wait_timeout_s


def test_create_sends_the_schema_and_the_layers(daemon: FakeDaemon, store: ps.Store) -> None:
    created = store.create_namespace("moe", SCHEMA, layers=[5, 3], experts=2, host_bytes="2MiB")
    (request,) = daemon.requests(m.CreateNamespace)
    assert (request.name, request.layers, request.experts, request.host_bytes) == ("moe", [3, 5], 2, 2 << 20)
    assert created.schema == SCHEMA
    assert created.mode == "write"


def test_open_namespace_is_a_reader_by_default(daemon: FakeDaemon, store: ps.Store) -> None:
    store.create_namespace("moe", SCHEMA, layers=1, experts=1).commit(4).wait()
    reader = store.open_namespace("moe", at=4)
    (request,) = daemon.requests(m.OpenNamespace)
    assert (request.mode, request.at) == ("read", 4)
    assert (reader.mode, reader.view_step) == ("read", 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "append"}, "append"),
        ({"mode": "write", "rank": 1}, "rank=1"),
        ({"mode": "write", "rank": 2, "world_size": 2}, "rank=2, world_size=2"),
    ],
)
def test_open_refuses_what_cannot_be(
    daemon: FakeDaemon, store: ps.Store, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ps.ConfigError, match=message):
        store.open_namespace("moe", **arguments)  # type: ignore[arg-type]
    assert daemon.requests(m.OpenNamespace) == []


def test_errors_of_opening_arrive_as_their_class(store: ps.Store) -> None:
    with pytest.raises(ps.UnknownNamespace, match="nothing"):
        store.open_namespace("nothing")
    store.create_namespace("moe", SCHEMA, layers=1, experts=1)
    with pytest.raises(ps.NamespaceExists):
        store.create_namespace("moe", SCHEMA, layers=1, experts=1)


def test_names_and_spaces_are_checked_before_anything_is_sent(daemon: FakeDaemon, store: ps.Store) -> None:
    with pytest.raises(ps.ConfigError, match="namespace name"):
        store.create_namespace("a/b", SCHEMA, layers=1, experts=1)
    with pytest.raises(ps.ConfigError, match="experts=0"):
        store.create_namespace("a", SCHEMA, layers=1, experts=0)
    assert daemon.requests(m.CreateNamespace) == []


def test_opening_with_a_result_that_is_no_opening_is_a_protocol_error(daemon: FakeDaemon, store: ps.Store) -> None:
    daemon.script(m.OpenNamespace, lambda session, request: session.send(m.Done(request.id, {"handle": "one"})))
    with pytest.raises(ps.ProtocolError):
        store.open_namespace("moe")


def test_namespaces_and_stats_are_mappings(store: ps.Store) -> None:
    store.create_namespace("moe", SCHEMA, layers=1, experts=2)
    assert [(each["name"], each["experts"]) for each in store.namespaces()] == [("moe", 2)]
    assert store.stats() == {"leases": 0}


def test_reconnect_opens_a_new_session_and_old_handles_stay_stale(daemon: FakeDaemon, store: ps.Store) -> None:
    stale = store.create_namespace("moe", SCHEMA, layers=1, experts=1)
    daemon.stop()
    with pytest.raises(ps.StoreUnavailable):
        store.stats()
    with FakeDaemon(daemon.path) as restarted:
        store.reconnect()
        assert store.stats() == {"leases": 0}
        with pytest.raises(ps.StoreUnavailable, match="open the namespaces again"):
            stale.steps()
        fresh = store.create_namespace("moe", SCHEMA, layers=1, experts=1)
        assert fresh.steps() == []
        assert len(restarted.requests(m.Hello)) == 1


def test_failed_reconnect_may_be_tried_again(daemon: FakeDaemon, store: ps.Store) -> None:
    daemon.stop()
    with pytest.raises(ps.StoreUnavailable):
        store.reconnect()
    with FakeDaemon(daemon.path):
        store.reconnect()
        assert store.stats() == {"leases": 0}


def test_closed_store_says_so(store: ps.Store) -> None:
    store.close()
    store.close()
    with pytest.raises(ps.StoreUnavailable, match="closed by this client"):
        store.stats()


def test_schemas_take_torch_dtypes_and_names() -> None:
    shapes = {"gate_up": (8, 4)}
    assert ps.adamw_schema(shapes, param_dtype=torch.float16) == ps.adamw_schema(shapes, param_dtype="float16")
    assert ps.adamw_schema(shapes, gradient_dtype=torch.float32).gradient_dtype == "float32"
    assert ps.param_schema({"w": ((2,), torch.uint8)}) == ps.param_schema({"w": ((2,), "uint8")})


# --- verify


def test_verify_asks_for_what_was_chosen_and_gives_what_was_found(daemon: FakeDaemon, store: ps.Store) -> None:
    assert store.verify().wait()["findings"] == []
    found = store.verify("moe", keys=iter([(0, 1), (2, 3)]), bytes_per_s="1MiB").wait()
    assert found["found"] == 0
    first, second = daemon.requests(m.Verify)
    assert (first.namespace, first.keys, first.bytes_per_s) == (None, None, None)
    assert (second.namespace, second.keys, second.bytes_per_s) == ("moe", [(0, 1), (2, 3)], 1 << 20)


def test_a_verify_can_be_cancelled(daemon: FakeDaemon, store: ps.Store) -> None:
    daemon.hold(m.Verify)
    ticket = store.verify()
    daemon.wait_for(m.Verify)
    assert not ticket.done()
    assert ticket.cancel()
    with pytest.raises(ps.TicketCancelled):
        ticket.wait()


def test_the_error_of_a_verify_is_the_tickets(daemon: FakeDaemon, store: ps.Store) -> None:
    daemon.fail(m.Verify, ps.CapacityError("a scrub is under way"))
    ticket = store.verify()
    with pytest.raises(ps.CapacityError, match="under way"):
        ticket.wait()


def test_a_rate_that_is_no_size_is_refused_before_anything_is_sent(daemon: FakeDaemon, store: ps.Store) -> None:
    with pytest.raises(ps.ConfigError, match="size 'fast'"):
        store.verify(bytes_per_s="fast")
    assert daemon.requests(m.Verify) == []


def test_an_older_daemon_is_not_asked_to_verify(daemon: FakeDaemon, store: ps.Store) -> None:
    daemon.minor = m.VERIFY_MINOR - 1
    store.reconnect()
    with pytest.raises(ps.VersionMismatch, match=r"speaks protocol 1\.0, verify needs 1\.1"):
        store.verify()
    assert store.namespaces() == []  # the connection is as good as before
    daemon.minor = m.VERIFY_MINOR
    store.reconnect()
    assert store.verify().wait()["found"] == 0
