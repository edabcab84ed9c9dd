"""What goes wrong in a request reaches the one who made it, typed and clear; nobody else sees anything of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

import paramstore_client as ps
from paramstore.wire import messages as m
from paramstore.wire.codec import FRAME_BYTES_MAX, LENGTH
from paramstore_client import client as client_module
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.wire.raw_client import RawClient

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_time")]

SCHEMA = ps.adamw_schema({"w": (64, 64)}, param_dtype="float32")
WIDE = (512, 512)
OPTIONS = ps.AdamW(lr=0.1)


# --- requests for what is not there


def test_an_unknown_namespace_is_named_with_those_there_are(store: ps.Store) -> None:
    with pytest.raises(ps.UnknownNamespace, match=r"'nobody'.*moe"):
        store.open_namespace("nobody")


def test_an_unknown_key_is_named_with_those_there_are(writer: ps.Namespace) -> None:
    gradient = {"w": torch.zeros(64, 64)}
    for call in (
        lambda: writer.acquire([(0, 0), (7, 1)]), lambda: writer.prefetch([(7, 1)]).wait(), lambda: writer.read((7, 1)),
        lambda: writer.push({(7, 1): gradient}), lambda: writer.protect([(7, 1)]), lambda: writer.evict([(7, 1)]).wait(),
    ):  # fmt: skip
        with pytest.raises(ps.UnknownKey, match=r"\(7, 1\).*'moe'.*layers 0 to 1"):
            call()


def test_an_unknown_part_is_named_with_those_there_are(writer: ps.Namespace) -> None:
    with pytest.raises(ps.SchemaMismatch, match=r"'nothing'.*optim, param"):
        writer.acquire([(0, 0)], part="nothing")
    with pytest.raises(ps.SchemaMismatch, match="'optim' cannot be leased"):
        writer.acquire([(0, 0)], part="optim")


@pytest.mark.parametrize(
    ("gradient", "reason"),
    [
        ({"w": torch.zeros(64, 63)}, "64, 63"), ({"w": torch.zeros(64, 64, dtype=torch.float64)}, "float64"),
        ({}, "w"), ({"w": torch.zeros(64, 64), "v": torch.zeros(1)}, "v"),
    ],
)  # fmt: skip
def test_a_gradient_of_another_shape_or_dtype_is_refused_whole(
    gradient: dict[str, torch.Tensor], reason: str, writer: ps.Namespace, store: ps.Store
) -> None:
    with pytest.raises(ps.SchemaMismatch, match=reason):
        writer.push({(0, 0): {"w": torch.zeros(64, 64)}, (0, 1): gradient})
    assert store.stats()["namespaces"]["moe"]["pending_gradients"] == 0


def test_an_initial_value_of_another_shape_is_refused(store: ps.Store) -> None:
    with (
        store.create_namespace("shapes", SCHEMA, layers=1, experts=1) as namespace,
        pytest.raises(ps.SchemaMismatch, match=r"\(0, 0\).*3"),
    ):
        namespace.initialize(lambda key: {"w": torch.zeros(3)})


def test_a_name_that_is_taken_is_refused(store: ps.Store) -> None:
    with pytest.raises(ps.NamespaceExists, match="committed at step 1"):
        store.create_namespace("moe", SCHEMA, layers=2, experts=4)


def test_a_step_that_is_not_there_is_refused(store: ps.Store, writer: ps.Namespace) -> None:
    with pytest.raises(ps.StepDropped, match="77"):
        store.open_namespace("moe", at=77)
    with pytest.raises(ps.StepDropped):
        writer.rollback(77)
    with pytest.raises(ps.StepOutOfOrder, match="1 is committed"):
        writer.commit(0).wait()
    assert writer.steps() == [1]


def test_a_reader_writes_nothing(store: ps.Store) -> None:
    with store.open_namespace("moe") as reader:
        for call in (lambda: reader.commit(5).wait(), lambda: reader.rollback(1), lambda: reader.apply(OPTIONS).wait()):
            with pytest.raises(ps.SchemaMismatch, match="open for reading"):
                call()


def test_a_writer_that_was_fenced_writes_no_more(store: ps.Store, writer: ps.Namespace) -> None:
    with store.open_namespace("moe", mode="write"):
        for call in (lambda: writer.commit(5).wait(), lambda: writer.acquire([(0, 0)]), writer.abort):
            with pytest.raises(ps.WriterFenced, match="another writer"):
                call()


# --- limits


def test_a_namespace_whose_records_no_budget_holds_is_refused_and_leaves_nothing(store: ps.Store) -> None:
    before = store.stats()
    with pytest.raises(ps.CapacityError, match=r"at least .* GiB of host memory.*raise host_budget"):
        store.create_namespace("huge", ps.adamw_schema({"w": (1 << 15, 1 << 15)}), layers=1, experts=2)
    after = store.stats()
    assert [entry["name"] for entry in store.namespaces() if entry["name"] == "huge"] == []
    assert after["volumes"]["0"]["size_bytes"] == before["volumes"]["0"]["size_bytes"]
    assert after["tiers"]["host"]["used_bytes"] == before["tiers"]["host"]["used_bytes"]


def test_an_absurd_schema_is_refused_at_once(store: ps.Store) -> None:
    with pytest.raises(ps.CapacityError):
        store.create_namespace("absurd", ps.adamw_schema({"w": (1 << 40,)}), layers=1, experts=1)


# --- peers that are not ours


def test_a_daemon_of_another_version_is_said_to_be_one(
    daemon: DaemonProcess, bystander: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PROTOCOL_MAJOR", m.PROTOCOL_MAJOR + 1)
    reason = rf"client speaks protocol {m.PROTOCOL_MAJOR + 1}\..*this daemon {m.PROTOCOL_MAJOR}\."
    with pytest.raises(ps.VersionMismatch, match=reason):
        ps.connect(daemon.address)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [(LENGTH.pack(5) + b"\xc1junk", "not a request"), (LENGTH.pack(FRAME_BYTES_MAX + 1), f"the limit is {FRAME_BYTES_MAX}")],
)
def test_a_client_that_sends_a_wrong_frame_learns_why_it_was_cut_off(frame: bytes, reason: str, store: ps.Store) -> None:
    store._connection._sock.sendall(frame)
    with pytest.raises(ps.ProtocolError, match=reason):
        store.stats()
    with pytest.raises(ps.StoreUnavailable, match="reconnect"):
        store.stats()
    store.reconnect()
    assert store.stats()["namespaces"]["moe"]["committed_step"] == 1


def test_hundreds_of_strangers_keep_nobody_from_being_served(daemon: DaemonProcess, store: ps.Store) -> None:
    async def strangers() -> None:
        clients = [RawClient.connect(daemon.socket) for _ in range(200)]
        for number, client in enumerate(clients):
            if number % 2:
                with suppress(OSError):  # too many wait for their hello: the first of them are gone
                    await client.send_bytes(b"\x00\x01\x00\x00" + bytes(100))
        for client in clients:
            client.close()

    asyncio.run(strangers())
    assert store.stats()["namespaces"]["moe"]["committed_step"] == 1


# --- two slots


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon with room for two records and two `param` copies of them, and for four gradients."""
    directory = tmp_path_factory.mktemp("narrow") / "store"
    budgets = ("--host-budget", "12MiB", "--gradient-budget", "4MiB")
    settings = {**QUIET, "PARAMSTORE_WAIT_TIMEOUT_S": "20", "PARAMSTORE_HELD_STEPS": "2"}
    with ForkedDaemon(directory, *budgets, environment=settings) as daemon:
        with ps.connect(daemon.address) as store:
            schema = ps.adamw_schema({"w": WIDE}, param_dtype="float32")
            with store.create_namespace("wide", schema, layers=1, experts=6) as namespace:
                namespace.initialize(lambda key: {"w": torch.full(WIDE, float(key[1]))})
                namespace.commit(1).wait()
            optim = store.stats()["namespaces"]["wide"]
            assert (optim["optim"]["slots"], optim["param"]["slots"]) == (2, 2)
        yield daemon


@pytest.fixture
def wide(narrow: DaemonProcess) -> Iterator[ps.Namespace]:
    with ps.connect(narrow.address) as store, store.open_namespace("wide", mode="write") as namespace:
        yield namespace


def gradients(keys: list[tuple[int, int]], value: float = 1.0) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    return {key: {"w": torch.full(WIDE, value)} for key in keys}


def test_more_keys_than_slots_are_refused_with_the_way_out(wide: ps.Namespace) -> None:
    with pytest.raises(ps.CapacityError, match=r"6 keys .* was promised 1 slots .* ask in parts, or raise host_budget"):
        wide.acquire(wide.keys())
    with wide.acquire([(0, 5)]) as lease:
        assert lease[0, 5]["w"][0, 0] == 5.0


def test_a_lease_that_only_the_callers_own_leases_block_is_refused_at_once(wide: ps.Namespace) -> None:
    with wide.acquire([(0, 0)]):
        with pytest.raises(ps.LeaseError, match="release some first"):
            wide.acquire([(0, 1)], timeout_s=20.0)
        with wide.acquire([(0, 0)]):
            pass  # another lease of the same bytes takes no slot
    with wide.acquire([(0, 1)]):
        pass


def test_readers_that_were_promised_nothing_are_told_who_has_the_slots_and_disturb_nobody(
    narrow: DaemonProcess, wide: ps.Namespace
) -> None:
    with ps.connect(narrow.address) as store, store.open_namespace("wide") as reader, wide.acquire([(0, 0)]):
        assert reader.lease_slots == 0
        with pytest.raises(ps.CapacityError, match=r"promised 0 slots .* the writer pid .* was promised 1: close"):
            reader.acquire([(0, 0)])
        assert reader.read((0, 2))["master/w"][0, 0] == 2.0
        assert reader.refresh() == reader.steps()[-1]
    with wide.acquire([(0, 1)]):
        pass


def test_gradients_over_the_budget_are_refused_whole_with_the_size_needed(wide: ps.Namespace) -> None:
    wide.push(gradients([(0, 0)]))
    with pytest.raises(ps.CapacityError, match=r"gradient_budget allows 4 MiB .* raise it to \d+ bytes, or apply"):
        wide.push(gradients(wide.keys()[1:]))
    assert wide.gradient_norm() == pytest.approx(512.0)
    assert wide.apply(OPTIONS).wait()["records"] == 1
    wide.push(gradients(wide.keys()[1:4]))
    assert wide.abort() == 3


def test_an_endless_prefetch_does_not_starve_an_update(narrow: DaemonProcess, wide: ps.Namespace) -> None:
    stop, failures, prefetched = threading.Event(), [], []

    def prefetch() -> None:
        try:
            with ps.connect(narrow.address) as store, store.open_namespace("wide") as reader:
                while not stop.is_set():
                    for part in ("param", "optim"):
                        prefetched.append(reader.prefetch(reader.keys(), part=part).wait())
        except Exception as error:  # noqa: BLE001 - told in the test's own thread
            failures.append(error)

    thread = threading.Thread(target=prefetch)
    thread.start()
    try:
        for step in (11, 12, 13):
            wide.push(gradients(wide.keys()[:4]))
            assert wide.apply(OPTIONS).wait()["records"] == 4
            with wide.acquire([(0, step - 11)], timeout_s=10.0):
                pass
            wide.commit(step).wait()
    finally:
        stop.set()
        thread.join(20.0)
    assert failures == []
    assert prefetched
    assert wide.committed_step == 13


def fails_with(error: type[Exception], call: Callable[[], Any]) -> None:
    with pytest.raises(error):
        call()


def test_a_closed_handle_and_a_closed_store_say_so(daemon: DaemonProcess, bystander: None) -> None:
    store = ps.connect(daemon.address)
    reader = store.open_namespace("moe")
    reader.close()
    fails_with(ps.UnknownNamespace, reader.steps)
    store.close()
    fails_with(ps.StoreUnavailable, store.stats)
