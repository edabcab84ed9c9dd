"""Slots that a reader has beyond its promise, in front of the real daemon: who opens gets them back while the reader goes on, and a
reader that cannot give them back keeps them, and its bytes.

64 slots: the reserve has 4, readers 16, of which the first is promised 8, writers 44.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import paramstore as ps
from paramstore.core.key import ExpertKey
from paramstore_client.device.host_slots import HostSlots, standing
from paramstore_testkit.processes.daemon_process import QUIET
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

pytestmark = pytest.mark.slow

LAYERS, EXPERTS = 2, 16
ALL = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
SHAPE = (32, 32)
PROMISED, OWN, WRITERS = 8, 7, 44
LENT = len(ALL) - OWN
SETTINGS = {**QUIET, "PARAMSTORE_WAIT_TIMEOUT_S": "4"}
RECALL_WAIT_S = 2.0
"""Half of the timeout; five seconds at most."""
LIMIT_S = 30.0
CHILD = """
import sys, torch, paramstore as ps
from paramstore_client.device.host_slots import standing
def value(key):
    return torch.full((32, 32), 100.0 * key[0] + key[1])
with ps.connect(sys.argv[1]) as store:
    slots = standing(store.open_namespace("moe"))
    keys = [(layer, expert) for layer in range(2) for expert in range(16)]
    for _ in range(3):
        for key in keys:
            slots.acquire([key]).release()
    held = slots.acquire(keys[:7])  # within the promise
    tensors = {key: held[key]["w"] for key in keys[:7]}
    print(slots.loans.count, flush=True)
    for line in sys.stdin:
        print(all(torch.equal(tensor, value(key)) for key, tensor in tensors.items()), flush=True)
"""


def value_of(key: ExpertKey) -> torch.Tensor:
    return torch.full(SHAPE, 100.0 * key[0] + key[1])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon with the namespace `moe`, committed at step 1, that every test leaves so."""
    directory = tmp_path_factory.mktemp("loans") / "store"
    arguments = ("--host-budget", "64MiB", "--gradient-budget", "4MiB")
    with ForkedDaemon(directory, *arguments, environment=SETTINGS) as daemon:
        with ps.connect(daemon.address) as store:
            schema = ps.adamw_schema({"w": SHAPE}, param_dtype="float32")
            with store.create_namespace("moe", schema, layers=LAYERS, experts=EXPERTS) as namespace:
                namespace.initialize(lambda key: {"w": value_of(key)})
                namespace.commit(1).wait()
        yield daemon.address


@pytest.fixture
def other(address: str) -> Iterator[ps.Store]:
    with ps.connect(address) as store:
        yield store


@pytest.fixture
def slots(address: str) -> Iterator[HostSlots]:
    """What stands of a reader whose loan is as large as it can be of use: every key."""
    with ps.connect(address) as store, store.open_namespace("moe") as reader:
        assert reader.lease_slots == PROMISED
        slots = standing(reader)
        assert isinstance(slots, HostSlots)
        deadline_s = time.monotonic() + LIMIT_S
        while slots.loans.count < LENT:
            assert time.monotonic() < deadline_s
            for key in ALL:
                visit(slots, [key])
        for key in ALL:
            visit(slots, [key])
        before = slots.counts.hits
        visit(slots, ALL[:EXPERTS])
        visit(slots, ALL[EXPERTS:])
        assert slots.counts.hits == before + len(ALL)
        yield slots


@pytest.fixture
def child(address: str) -> Iterator[subprocess.Popen[str]]:
    """A reader in a process of its own, which borrowed and is idle: what it holds beyond its promise can be given back."""
    command = [sys.executable, "-c", CHILD, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        yield process
        process.kill()


def visit(slots: HostSlots, keys: list[ExpertKey]) -> None:
    """A visit that finds the bytes of its keys."""
    with slots.acquire_arriving(keys, may_pass=True) as lease:
        for key in lease.in_turn():
            assert torch.equal(lease[key]["w"], value_of(key)), key


def opened(store: ps.Store, **named: int) -> ps.Namespace:
    """A writer that has all the slots that it asks for, and finds the bytes of as many keys as there are in them."""
    writer = store.open_namespace("moe", mode="write", **named)  # type: ignore[arg-type]
    with writer.acquire(ALL, timeout_s=LIMIT_S) as lease:
        for key in ALL:
            assert torch.equal(lease[key]["w"], value_of(key)), key
    return writer


def in_thread(call: Callable[[], ps.Namespace]) -> tuple[threading.Thread, list[ps.Namespace]]:
    results: list[ps.Namespace] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def test_who_opens_gets_its_promise_while_the_reader_is_in_the_middle_of_visits(slots: HostSlots, other: ps.Store) -> None:
    errors: list[BaseException] = []
    is_over, visited = threading.Event(), []

    def decode() -> None:
        rng = random.Random(3)
        try:
            while not is_over.is_set():
                visit(slots, rng.sample(ALL, 4))
                visited.append(slots.loans.count)
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    reader = threading.Thread(target=decode)
    reader.start()
    try:
        for _ in range(3):
            with opened(other, min_lease_slots=WRITERS) as writer:
                assert writer.lease_slots == WRITERS
                assert slots.loans.count <= 64 - 4 - PROMISED - WRITERS
                done = len(visited)
                while len(visited) < done + 20 and not errors:
                    with writer.acquire(ALL[:EXPERTS], timeout_s=LIMIT_S) as lease:
                        assert torch.equal(lease[0, 3]["w"], value_of((0, 3)))
            deadline_s = time.monotonic() + LIMIT_S
            while slots.loans.count < LENT and not errors:  # it borrows again
                assert time.monotonic() < deadline_s
    finally:
        is_over.set()
        reader.join(LIMIT_S)
    assert errors == []


def test_an_idle_reader_gives_back_without_a_visit(slots: HostSlots, other: ps.Store) -> None:
    with opened(other, min_lease_slots=WRITERS):  # where nothing comes back in time it is refused
        assert slots.loans.count == 64 - 4 - PROMISED - WRITERS
        visit(slots, ALL)


def test_who_comes_after_a_keeper_that_was_closed_borrows_at_once(slots: HostSlots) -> None:
    slots.close()
    after = standing(slots.namespace)  # type: ignore[arg-type]  # a namespace is such a source
    assert isinstance(after, HostSlots)
    deadline_s = time.monotonic() + LIMIT_S
    while after.loans.count < LENT:
        assert time.monotonic() < deadline_s, "the first one keeps the loan as long as it lives"
        for key in ALL:
            visit(after, [key])


def test_what_a_kernel_still_uses_is_given_back_when_its_visit_ends(slots: HostSlots, other: ps.Store) -> None:
    with slots.acquire_arriving(ALL, may_pass=True) as lease:
        tensors = {key: lease[key]["w"] for key in lease.in_turn() if not lease.passes(key)}
        assert len(tensors) > OWN + 8, "more than may stand without the loan"
        thread, results = in_thread(lambda: opened(other, min_lease_slots=WRITERS))
        deadline_s = time.monotonic() + LIMIT_S
        while slots.loans.word[0] == LENT:
            assert time.monotonic() < deadline_s, "nothing was asked back"
        visit(slots, ALL[:2])
        assert all(torch.equal(tensor, value_of(key)) for key, tensor in tensors.items())
        assert not results
    thread.join(LIMIT_S)
    assert [writer.lease_slots for writer in results] == [WRITERS]
    results[0].close()


def test_a_stopped_reader_is_waited_for_a_bounded_time_and_loses_nothing(child: subprocess.Popen[str], other: ps.Store) -> None:
    child.send_signal(signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        told = rf"slots that are lent were not given back in time: .*pid {child.pid} .*promised 8 and lent \d+"
        with pytest.raises(ps.CapacityError, match=told):
            other.open_namespace("moe", mode="write", min_lease_slots=WRITERS)
        assert RECALL_WAIT_S <= time.monotonic() - began_s < RECALL_WAIT_S + LIMIT_S / 2
        with other.open_namespace("moe", mode="write") as writer:
            assert OWN < writer.lease_slots < WRITERS, "without a minimum it has what is there"
            with writer.acquire(ALL[: writer.lease_slots], timeout_s=LIMIT_S) as lease:
                assert all(torch.equal(lease[key]["w"], value_of(key)) for key in lease)
            writer.evict()
    finally:
        child.send_signal(signal.SIGCONT)
    assert answer_of(child) == "True"
    with opened(other, min_lease_slots=WRITERS):
        assert answer_of(child) == "True"


def test_a_killed_readers_slots_are_there_at_once(child: subprocess.Popen[str], other: ps.Store) -> None:
    child.send_signal(signal.SIGSTOP)
    thread, results = in_thread(lambda: opened(other, min_lease_slots=WRITERS))
    child.kill()
    thread.join(LIMIT_S)
    assert [writer.lease_slots for writer in results] == [WRITERS]
    results[0].close()


def answer_of(child: subprocess.Popen[str]) -> str:
    """Whether what it leased within its promise holds the right bytes."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("check\n")
    child.stdin.flush()
    return child.stdout.readline().strip()


def test_a_daemon_that_lends_nothing_is_served_with_the_promise_alone(address: str) -> None:
    with ps.connect(address) as store:
        store._connection.minor = 6
        with store.open_namespace("moe") as reader:
            slots = standing(reader)
            assert isinstance(slots, HostSlots)
            for key in ALL * 2:
                visit(slots, [key])
            assert (slots.loans.count, store.stats()["namespaces"]["moe"]["leased_slots"]) == (0, OWN)
