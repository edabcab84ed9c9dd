"""A host tier over plain memory that is counted, and small namespaces for it."""

from __future__ import annotations

import asyncio

from paramstore.core.key import KeySpace
from paramstore.core.schema import Schema
from paramstore.engine.admission import make_namespace
from paramstore.engine.capacity.host import HostTier
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.transfers.buffers import Buffers
from paramstore.engine.transfers.runner import BACKGROUND_LANE, Runner
from paramstore.errors import CapacityError
from paramstore.policy.lru import Lru
from paramstore.storage.catalog.base import NamespaceContents, NamespaceRow
from paramstore.storage.catalog.ledger import Ledger
from paramstore.testing.workers import InlineWorkers
from paramstore_testkit.disks.machine import PlainMemory, PlainSegment

MIB = 1 << 20
SMALL = Schema.adamw({"w": (3, 5), "v": (7,)}, param_dtype="float32")
LARGE = Schema.adamw({"w": (256, 1024)}, param_dtype="bfloat16")
"""Schema of records of 3 MiB, with a `param` of half a MiB."""
OPAQUE = Schema.param({"w": ((512, 1024), "uint8")})


class CountingMemory(PlainMemory):
    """Plain memory that counts its open segments, and runs out when told to."""

    def __init__(self) -> None:
        self.open: list[CountedSegment] = []
        self.touches_left = 1 << 30

    def shared(self, length_bytes: int) -> PlainSegment:
        return CountedSegment(self, length_bytes)

    private = upload = shared


class CountedSegment(PlainSegment):
    def __init__(self, memory: CountingMemory, length_bytes: int) -> None:
        super().__init__(length_bytes)
        self._counted = memory
        self.fd = 99
        memory.open.append(self)

    def touch(self) -> None:
        self._counted.touches_left -= 1
        if self._counted.touches_left < 0:
            raise CapacityError("the machine has no more memory")

    def close(self) -> None:
        self._counted.open.remove(self)


def host_tier(memory: PlainMemory, *, budget_bytes: int = 64 * MIB, io_threads: int = 2) -> HostTier:
    runner = Runner(InlineWorkers(asyncio.get_running_loop()))
    runner.scheduler.add_lane(BACKGROUND_LANE, 1)
    return HostTier(
        runner, memory, Buffers(), budget_bytes=budget_bytes, io_threads=io_threads, piece_bytes=MIB,
        pipeline_slots=6, make_policy=lambda capacity: Lru(),
    )  # fmt: skip


def namespace_of(schema: Schema, name: str = "moe", experts: int = 8) -> NamespaceState:
    row = NamespaceRow(name, schema.describe(), KeySpace.of(1, experts).layers, experts, epoch=1, sequence=0)
    return make_namespace(Ledger(NamespaceContents(row)))


async def grow_all(host: HostTier, namespace: NamespaceState) -> None:
    for arena in namespace.arenas():
        while await host.grow(namespace, arena):
            pass
