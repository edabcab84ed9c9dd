"""Daemon after daemon whose policies' counts lie in a directory, without their stores; and disks that fail or hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any

from paramstore.core.key import ExpertKey, KeySpace
from paramstore.engine.admission import make_namespace
from paramstore.engine.planner.arenas import open_arenas, warm
from paramstore.engine.tables.arena import Arena
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.policy.base import CountingPolicy
from paramstore.policy.decayed_lfu import DecayedLfu
from paramstore.storage.catalog.base import NamespaceContents, NamespaceRow
from paramstore.storage.catalog.ledger import Ledger
from paramstore.upkeep.warmth import Warmth
from paramstore_testkit.stores.small_host import SMALL

STORE = b"s" * 16
HOT: ExpertKey = (1, 0)


class Killed(Exception):
    """The process is gone."""


class Disk(Executor):
    """Runs each call at once and writes down its name. fails_at: number of the call, from 0, that raises `error`; after a kill all
    later ones do. A file is closed nevertheless."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.fails_at = fails_at
        self.error: Exception = Killed()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future, number = Future[Any](), len(self.calls)
        self.calls.append((function.func if isinstance(function, partial) else function).__name__)
        fails = number == self.fails_at or (isinstance(self.error, Killed) and number > (self.fails_at or number))
        try:
            result = None if fails and self.calls[-1] != "close" else function(*arguments, **named)
        except OSError as error:
            future.set_exception(error)
            return future
        if fails:
            future.set_exception(self.error)
        else:
            future.set_result(result)
        return future


class HangingDisk(Executor):
    """Takes calls and never answers."""

    def __init__(self) -> None:
        self.calls = 0

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        self.calls += 1
        return Future()


class Rest:
    """The pauses of a `Warmth`, which end when a test says so."""

    def __init__(self) -> None:
        self.asked_s: list[float] = []
        self.over = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.asked_s.append(seconds)
        self.over.clear()
        await self.over.wait()

    async def end(self) -> None:
        """Ends the pause, and returns when the next one has begun."""
        count = len(self.asked_s)
        self.over.set()
        while len(self.asked_s) == count:
            await asyncio.sleep(0)


def namespace_of(name: str = "moe", *, layers: Sequence[int] = (1, 3), epoch: int = 4) -> NamespaceState:
    row = NamespaceRow(name, SMALL.describe(), KeySpace.of(layers, 3).layers, 3, epoch=epoch, sequence=0)
    return make_namespace(Ledger(NamespaceContents(row)))


def lfu() -> DecayedLfu:
    return DecayedLfu(threshold=0.0, beta=0.5, decay_steps=64, capacity=4)


def opened(namespace: NamespaceState, make: Callable[[], CountingPolicy] = lfu) -> tuple[CountingPolicy, CountingPolicy]:
    """Opens the namespace's arenas as the host tier does; gives the policies of `param` and `optim`."""
    param, optim = make(), make()
    for policy, part in ((param, "param"), (optim, "optim")):
        for _ in warm(policy, namespace, part):
            pass
    arenas = [Arena(slot_bytes=4096, planned_slots=4, policy=policy) for policy in (param, optim)]
    open_arenas(namespace, *arenas)
    return param, optim


def warmth_of(directory: Path, *namespaces: NamespaceState, disk: Executor | None = None, rest: Rest | None = None) -> Warmth:
    named = {namespace.name: namespace for namespace in namespaces}
    return Warmth(directory, named, store_uuid=STORE, threads=disk or Disk(), pause=rest or Rest())


async def started(directory: Path, *namespaces: NamespaceState, rest: Rest | None = None) -> tuple[Warmth, Disk]:
    disk = Disk()
    warmth = warmth_of(directory, *namespaces, disk=disk, rest=rest)
    await warmth.start()
    return warmth, disk


async def lived(directory: Path, *, uses: int = 2) -> None:
    """One daemon's life, in which HOT was used `uses` times in `param`, and once more in `optim`."""
    namespace = namespace_of()
    warmth, _ = await started(directory, namespace)
    param, optim = opened(namespace)
    param.record_all([HOT] * uses)
    optim.record_all([HOT] * (uses + 1))
    await warmth.close()


async def heat_after(directory: Path, namespace: NamespaceState | None = None) -> list[float]:
    """Heat of HOT in both arenas of the next daemon, which uses nothing and so writes nothing."""
    namespace = namespace or namespace_of()
    warmth, disk = await started(directory, namespace)
    heat = [policy.heat(HOT) for policy in opened(namespace)]
    disk.calls.clear()
    await warmth.close()
    assert disk.calls == []
    return heat
