"""A store on simulated disks with sessions over socket pairs: the daemon's own code, in this process and loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from paramstore.core.schema import Schema
from paramstore.daemon.assembly import HostMemory
from paramstore.daemon.session import Session
from paramstore.engine.report import namespace_stats, residency
from paramstore.engine.store import Store
from paramstore.memory.arena import PageKind, PageReport
from paramstore.wire import messages as m
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.wire.raw_client import RawClient

LIMIT_S = 30.0
SCHEMA = Schema.adamw({"w": (16, 16)}, param_dtype="float32")
SMALL_PAGES = PageReport(shared=PageKind.SMALL, private=PageKind.SMALL, advice="")
TURNS_MAX = 100_000


class Desk:
    """One store, its sessions, and clients of them. Owner of all three.

    gone: the sessions that told the server that nothing is left of them.
    """

    def __init__(self, **machine: Any) -> None:
        self.machine = Machine(seed=1, **{"volume_size_bytes": 14 << 20, **machine})
        self.store: Store = self.machine.start()
        self.service = self.machine.service
        self.store.host.memory = HostMemory(SMALL_PAGES)  # what a client maps must be a memfd
        self.sessions: list[Session] = []
        self.clients: list[RawClient] = []
        self.gone: list[Session] = []

    def connect(self) -> RawClient:
        """A client that has said nothing yet."""
        ours, theirs = socket.socketpair()
        self.sessions.append(Session(self.service, theirs, on_gone=self.gone.append))
        self.clients.append(RawClient(ours))
        return self.clients[-1]

    async def client(self) -> RawClient:
        """A client that is known."""
        client = self.connect()
        await client.hello()
        return client

    async def create(self, client: RawClient, *, name: str = "moe", experts: int = 4) -> int:
        """The handle of a new namespace of SCHEMA whose every key has a value; committed at step 1."""
        opened = await client.request(m.CreateNamespace, name, SCHEMA.describe(), [0], experts)
        handle: int = opened["handle"]
        segment = await self.upload(client, SCHEMA.initial_bytes)
        await client.request(m.InitializeBegin, handle)
        for expert in range(experts):
            await client.request(m.InitializePut, handle, (0, expert), segment, 0)
        await client.request(m.InitializeEnd, handle)
        await client.request(m.Commit, handle, 1)
        return handle

    async def upload(self, client: RawClient, length_bytes: int) -> int:
        """An upload segment of zeros."""
        answer: m.Uploaded = await client.request(m.OpenUpload, length_bytes)
        os.close(client.fds.pop())
        return answer.segment

    async def push(self, client: RawClient, handle: int, keys: list[m.Key]) -> None:
        segment = await self.upload(client, len(keys) * SCHEMA.gradient_bytes)
        entries = [(*key, segment, index * SCHEMA.gradient_bytes) for index, key in enumerate(keys)]
        await client.request(m.Push, handle, entries)

    async def until(self, condition: Callable[[], object]) -> None:
        """Returns when `condition` holds; fails if many turns of the loop do not bring it about."""
        for _ in range(TURNS_MAX):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it did not come about")

    def figures(self) -> dict[str, Any]:
        """Of the namespace `moe`."""
        return namespace_stats(self.store.namespaces["moe"], 0.0)

    def param_states(self) -> list[str]:
        """Of the namespace `moe`, per key."""
        found: Any = residency(self.store.namespaces["moe"])["param"]
        return list(found)

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        for client in self.clients:
            client.close()


Scenario = Callable[[Desk], Coroutine[Any, Any, None]]


@pytest.fixture
def at_desk() -> Callable[..., None]:
    """Runs a scenario with a desk of its own, within LIMIT_S. Errors that reached nobody but the loop fail it too."""

    def run(scenario: Scenario, **machine: Any) -> None:
        unseen: list[dict[str, Any]] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
            desk = Desk(**machine)
            try:
                await asyncio.wait_for(scenario(desk), LIMIT_S)
            finally:
                desk.close()

        asyncio.run(main())
        assert not unseen

    return run
