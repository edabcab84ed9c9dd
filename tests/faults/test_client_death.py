"""A client dies in every state of its work, in every way: the daemon lives, another client notices nothing, all it had comes back.

Leases end with the client's process and not with its socket: what it leased stays as it was until the process is gone.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest
import torch

import paramstore_client as ps
from paramstore_testkit.processes.dying_clients import AWAITED, LEASED, NAME, DyingClients
from paramstore_testkit.processes.killable_serve import KillableDaemons

pytestmark = pytest.mark.slow

SHAPE = (64, 64)
LAYERS, EXPERTS = 2, 4
LIMIT_S = 10.0
BUG_LIMIT_S = 1.0
CALL_S = 5.0
CHURNS = 3
HELD = (0, 3)
"""What the other client has leased all the time."""

STATES = ("idle", "leased", "waiting", "mid_push", "half_frame", "applying", "forked", "stopped")
DEATHS = ("kill", "exit", "shutdown")
GATED = {"waiting": "read", "applying": "update.before"}
WRITING = ("mid_push", "half_frame", "applying")
FIGURES = ("leased_slots", "views", "has_writer", "pending_gradients", "broken")


class Desk:
    """A daemon, another client beside those that die, and what the daemon holds as that client and the kernel see it."""

    def __init__(self, daemons: KillableDaemons, folder: Path, *, bugs: tuple[str, ...] = (), limit_s: float = LIMIT_S) -> None:
        self.gates: dict[str, IO[bytes]] = {}
        paths = {name: folder / f"{name}.gate" for name in GATED.values()}
        for name, path in paths.items():
            self.gates[name] = path.open("wb")
        address = daemons.start(folder / "store", gates=paths, bugs=bugs, flags={"reader_slots": 8})
        assert address is not None
        self.address = address
        self.limit_s = limit_s
        self._pid = daemons.pid
        self.store = ps.connect(self.address)
        self._fill()
        self.reader = self.store.open_namespace(NAME)
        self.lease = self.reader.acquire([HELD])
        self._held = self.lease.clone()[HELD]["w"]

    def _fill(self) -> None:
        schema = ps.adamw_schema({"w": SHAPE}, param_dtype="float32")
        with self.store.create_namespace(NAME, schema, layers=LAYERS, experts=EXPERTS) as writer:
            writer.initialize(lambda key: {"w": torch.full(SHAPE, float(1 + 10 * key[0] + key[1]))})
            writer.commit(1).wait()
        self.churn()

    def close(self) -> None:
        self.lease.release()
        self.store.close()
        for gate in self.gates.values():
            gate.close()

    def churn(self) -> None:
        """Every key gets a new version, time and again, and is leased: all slots that are free are used."""
        with self.store.open_namespace(NAME, mode="write") as writer:
            for _ in range(CHURNS):
                writer.push({key: {"w": torch.ones(SHAPE)} for key in writer.space})
                writer.apply(ps.AdamW(lr=1.0)).wait(CALL_S)
                for key in writer.space:
                    writer.acquire([key], timeout_s=CALL_S).release()

    def evict(self) -> None:
        """Nothing is resident but what is leased."""
        self.reader.evict().wait(CALL_S)

    def figures(self) -> dict[str, Any]:
        stats = self.store.stats()
        found = stats["namespaces"][NAME]
        links = self._descriptors()
        host = stats["tiers"]["host"]
        return {
            **{name: found[name] for name in FIGURES}, "retired": found["param"]["retired"],
            "pieces under way": pieces_under_way(stats), "descriptors": len(links),
            "processes watched": sum("pidfd" in link for link in links), "sockets": sum("socket:" in link for link in links),
            "upload_bytes": host["upload_bytes"], "used_bytes": host["used_bytes"], "segments": host["segments"],
        }  # fmt: skip

    def _descriptors(self) -> list[str]:
        """What the daemon's descriptors stand for; one may be closed while we look."""
        links = []
        for entry in Path(f"/proc/{self._pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                links.append(os.readlink(entry))
        return links

    def works(self) -> None:
        """The other client: what it leased is as it was, and its calls are answered in time."""
        assert torch.equal(self.lease[HELD]["w"], self._held)
        with self.reader.acquire([HELD], timeout_s=CALL_S) as again:
            assert torch.equal(again[HELD]["w"], self._held)
        assert self.reader.steps() == [1]
        assert self.store.stats()["daemon"]["accepts_writes"]

    def until(self, condition: Callable[[], object]) -> None:
        """Returns when a condition holds; asking it is what takes the time. Raises AssertionError at the limit."""
        deadline_s = time.monotonic() + self.limit_s
        while not condition():
            assert time.monotonic() < deadline_s, f"it did not come about: {self.figures()}"

    def until_as_before(self, before: dict[str, Any]) -> None:
        deadline_s = time.monotonic() + self.limit_s
        while (now := self.figures()) != before:
            differ = {name: (before[name], now[name]) for name in before if before[name] != now[name]}
            assert time.monotonic() < deadline_s, f"(before, now) of what did not come back: {differ}"

    @contextmanager
    def gate(self, name: str) -> Iterator[None]:
        """A point at which the daemon's workers wait meanwhile."""
        fcntl.flock(self.gates[name], fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.gates[name], fcntl.LOCK_UN)


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableDaemons]:
    with KillableDaemons(tmp_path_factory.mktemp("daemons") / "log", is_plain=True) as daemons:
        yield daemons


@pytest.fixture(scope="module")
def faulty_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableDaemons]:
    with KillableDaemons(tmp_path_factory.mktemp("daemons") / "log", is_plain=True) as daemons:
        yield daemons


@pytest.fixture(scope="module")
def client_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DyingClients]:
    with DyingClients(tmp_path_factory.mktemp("clients") / "log") as clients:
        yield clients


@pytest.fixture
def clients(client_server: DyingClients) -> Iterator[DyingClients]:
    """None of them outlives its test."""
    yield client_server
    client_server.kill()


def pieces_under_way(stats: dict[str, Any]) -> int:
    """What volumes and cpu workers do. Asking for statistics itself takes the background."""
    lanes = (figures for lane, figures in stats["queues"].items() if lane == "cpu" or "volume" in lane)
    return sum(figures["queued"] + figures["running"] for figures in lanes)


@pytest.fixture(scope="module")
def desk(daemons: KillableDaemons, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """One daemon for all cells, so that what one of them leaves behind the next ones see."""
    desk = Desk(daemons, tmp_path_factory.mktemp("desk"))
    yield desk
    desk.close()
    daemons.kill()


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("state", STATES)
def test_a_death_leaves_nothing_and_disturbs_nobody(state: str, death: str, desk: Desk, clients: DyingClients) -> None:
    die(desk, clients, state, death)


def test_after_all_deaths_all_slots_can_be_used_again(desk: Desk) -> None:
    desk.evict()
    param = desk.store.stats()["namespaces"][NAME]["param"]
    assert (param["free"], param["waiting"]) == (param["slots"] - 1, 0)  # one is leased by the other client


@pytest.mark.parametrize(
    ("bug", "state", "death"),
    [
        ("free_on_hangup", "leased", "shutdown"), ("forget_process", "leased", "shutdown"), ("keep_uploads", "mid_push", "kill"),
        ("leak_descriptor", "idle", "exit"),
    ],
)  # fmt: skip
def test_a_planted_bug_is_found(
    bug: str, state: str, death: str, faulty_daemons: KillableDaemons, clients: DyingClients, tmp_path: Path
) -> None:
    desk = Desk(faulty_daemons, tmp_path, bugs=(bug,), limit_s=BUG_LIMIT_S)
    with pytest.raises(AssertionError, match=r"leases ended before the process|did not come back|did not come about"):
        die(desk, clients, state, death)
    desk.close()
    faulty_daemons.kill()


def die(desk: Desk, clients: DyingClients, state: str, death: str) -> None:
    """One client comes to `state` and dies by `death`; what must hold before, meanwhile and afterwards does."""
    desk.evict()
    desk.works()
    before = desk.figures()
    with ExitStack() as stack:
        digest = begin(desk, clients, state, death, stack)
        during = check_state(desk, state, before)
        desk.works()
        end(desk, clients, state, death, during)
        desk.works()
        if death == "shutdown":
            check_hung_up(desk, clients, state, before, digest)
        if state == "applying":
            assert desk.figures()["upload_bytes"] > before["upload_bytes"], "the apply still reads there"
        if state == "forked":
            desk.until_as_before(before)  # the child lives on, and has nothing
    desk.until_as_before(before)
    desk.works()


def begin(desk: Desk, clients: DyingClients, state: str, death: str, stack: ExitStack) -> str:
    """The client is in its state: the digest of what it leased. stack: opens the gate again, ends the child that it forked."""
    clients.fork({"address": desk.address, "state": "leased" if state == "stopped" else state, "death": death})
    said = clients.heard()
    assert said is not None
    if said == "gate":
        stack.enter_context(desk.gate(GATED[state]))
        clients.signal(signal.SIGUSR1)
        said = clients.heard()
    elif said.startswith("child "):
        stack.callback(end_process, os.pidfd_open(int(said.removeprefix("child "))))
        said = clients.heard()
    if state == "stopped":
        clients.signal(signal.SIGSTOP)
    assert said is not None
    return said.removeprefix("ready ")


def end_process(pidfd: int) -> None:
    """SIGKILL to a process that lives."""
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


def check_state(desk: Desk, state: str, before: dict[str, Any]) -> dict[str, Any]:
    """The daemon has got as far as the state says."""
    if state == "waiting":
        desk.until(lambda: pieces_under_way(desk.store.stats()))
    if state == "applying":
        desk.until(lambda: desk.store.stats()["namespaces"][NAME]["optim"].get("updating"))
    during = desk.figures()
    assert during["views"] == before["views"] + 1
    assert during["leased_slots"] >= before["leased_slots"] + (len(LEASED) if state != "idle" else 0)
    assert during["has_writer"] == (state in WRITING)
    assert during["pending_gradients"] == (state in ("mid_push", "half_frame"))
    assert (during["upload_bytes"] > before["upload_bytes"]) == (state in WRITING)
    return during


def end(desk: Desk, clients: DyingClients, state: str, death: str, during: dict[str, Any]) -> None:
    """The client dies, or (shutdown) hangs up."""
    if death == "kill":
        clients.kill()
        return
    clients.signal(signal.SIGUSR1)
    if state == "stopped":
        assert desk.figures() == during  # it does nothing, and loses nothing
        clients.signal(signal.SIGCONT)
    if death == "exit":
        clients.wait_ended()
    else:
        assert clients.heard() == "hung up"


def check_hung_up(desk: Desk, clients: DyingClients, state: str, before: dict[str, Any], digest: str) -> None:
    """The session has ended; the process has what it leased, whatever others do, and then ends too."""
    desk.until(lambda: desk.figures()["sockets"] == before["sockets"])
    now = desk.figures()
    assert not now["has_writer"]
    assert not now["pending_gradients"]
    leased = now["leased_slots"] - before["leased_slots"]
    assert leased == (0 if state == "idle" else len(LEASED)), "leases ended before the process"
    if state not in GATED:  # else the churn would wait at the gate
        desk.churn()
    clients.signal(signal.SIGUSR1)
    assert clients.heard() == digest, "leases ended before the process: others wrote where it reads"
    clients.signal(signal.SIGUSR1)
    clients.wait_ended()


def test_the_awaited_key_is_none_that_anybody_has() -> None:
    assert AWAITED not in (*LEASED, HELD)
