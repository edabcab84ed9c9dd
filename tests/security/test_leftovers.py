"""What one namespace held never reaches another's clients: not by memory they map, not by records they read, not by the disk.

Nor does it reach a core dump. That segments are marked for that is in `tests/memory/test_arena.py`.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore.core.location import Extent
from paramstore.core.schema import Schema
from paramstore.daemon.assembly import HostMemory
from paramstore.daemon.service import Service
from paramstore.daemon.session import Session
from paramstore.engine.store import Store
from paramstore.memory.arena import PageKind, PageReport
from paramstore.storage.catalog.ledger import Ledger
from paramstore.wire import messages as m
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.stores.memory_disk import MemoryDisk
from paramstore_testkit.wire.raw_client import RawClient

MIB = 1 << 20
LIMIT_S = 60.0
POISON = bytes.fromhex("a55a c33c 9669 1ee1") * 8
"""A stretch that nothing else has; as fp32 numbers they are ordinary ones."""
SECRET = Schema.adamw({"w": (1000,), "v": (3000,)}, param_dtype="float32")
OTHER = Schema.adamw({"w": (700,), "u": (3,), "t": (2100,)}, param_dtype="float32")
"""Other fields, other padding, records of about the same size: extents of the one fit the other."""
EXPERTS = 4
HOST_BYTES = 8 * MIB
"""Room for either namespace, not for both."""
STEPS = range(2, 7)
OPTIONS = {"lr": 0.0, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "grad_scale": 1.0}
"""Masters stay as they are, their records get new versions."""
CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
VM_FLAGS_OF_NO_DUMP = "dd"


class Tenant:
    """A client, its one namespace, and everything that it can see."""

    def __init__(self, service: Service, schema: Schema) -> None:
        ours, theirs = socket.socketpair()
        self.session = Session(service, theirs, on_gone=lambda session: None)
        self.client = RawClient(ours)
        self.schema = schema
        self.handle = self.segment = 0
        self.mappings: list[mmap.mmap] = []
        """The first is the upload segment, the others are leased."""

    async def begin(self, name: str, fill: bytes) -> None:
        """A committed namespace whose fields are full of `fill`."""
        await self.client.hello()
        opened = await self.client.request(
            m.CreateNamespace, name, self.schema.describe(), [0], EXPERTS, host_bytes=HOST_BYTES
        )
        self.handle = opened["handle"]
        answer: m.Uploaded = await self.client.request(m.OpenUpload, EXPERTS * self.schema.record_bytes)
        self.segment, memory = answer.segment, mmap.mmap(self.client.fds.pop(), answer.length_bytes)
        self.mappings.append(memory)
        assert memory[:].count(0) == len(memory), "new upload memory is not empty"
        for field in self.schema.initial_fields():
            memory[field.offset_bytes : field.offset_bytes + field.length_bytes] = (fill * field.length_bytes)[: field.length_bytes]
        await self.client.request(m.InitializeBegin, self.handle)
        for expert in range(EXPERTS):
            await self.client.request(m.InitializePut, self.handle, (0, expert), self.segment, 0)
        await self.client.request(m.InitializeEnd, self.handle)
        await self.client.request(m.Commit, self.handle, 1)

    async def train(self, ledger: Ledger) -> set[Extent]:
        """New versions of all records, in new extents, one step after the other. Gives all extents that had some."""
        extents = set(ledger.extents())
        for step in STEPS:
            await self.client.request(m.Push, self.handle, [(0, expert, self.segment, 0) for expert in range(EXPERTS)])
            await self.client.request(m.Apply, self.handle, **OPTIONS)
            await self.client.request(m.Commit, self.handle, step)
            extents |= set(ledger.extents())
        return extents

    async def look(self) -> None:
        """Maps all it is given by leases, and copies every record, header and padding too, to where it can read it."""
        for expert in range(EXPERTS):
            granted: m.Granted = await self.client.request(m.Acquire, self.handle, [(0, expert)], "param", 5.0)
            for _, length_bytes in granted.segments:
                self.mappings.append(mmap.mmap(self.client.fds.pop(0), length_bytes, prot=mmap.PROT_READ))
            await self.client.send(m.Release([granted.id]))
            await self.client.request(m.Read, self.handle, (0, expert), self.segment, expert * self.schema.record_bytes)

    def sees(self, pattern: bytes) -> bool:
        return any(mapping.find(pattern) >= 0 for mapping in self.mappings)

    def close(self) -> None:
        while self.mappings:
            self.mappings.pop().close()
        self.client.close()
        self.session.close()


def bytes_in(machine: Machine, extents: Iterable[Extent]) -> bytes:
    disks = {index: MemoryDisk(volume) for index, volume in machine.volumes.items()}
    return b"".join(disks[volume].read(offset_bytes, length_bytes) for volume, offset_bytes, length_bytes in extents)


def pages_of(extents: Iterable[Extent]) -> set[tuple[int, int]]:
    return {(volume, page) for volume, start, length in extents for page in range(start, start + length, 4096)}


async def one_after_the_other(machine: Machine, store: Store, secret: Tenant, other: Tenant) -> None:
    await secret.begin("secret", POISON)
    ledger = store.namespaces["secret"].steps.ledger
    extents = await secret.train(ledger)
    await secret.look()
    assert secret.sees(POISON)
    assert POISON in bytes_in(machine, ledger.extents())
    secret.close()
    await other.begin("other", bytes(8))
    assert not store.namespaces["secret"].has_memory, "its memory was not needed"
    theirs = await other.train(store.namespaces["other"].steps.ledger)
    await other.look()
    assert pages_of(extents) & pages_of(theirs), "no extent was used again"
    assert POISON[:16] not in bytes_in(machine, theirs)
    assert len(other.mappings) >= 2
    assert not other.sees(POISON[:16])


@pytest.mark.slow
def test_a_namespace_that_takes_anothers_memory_and_extents_sees_nothing_of_it() -> None:
    async def scenario() -> None:
        machine = Machine(seed=3, volume_size_bytes=14 * MIB, host_budget_bytes=HOST_BYTES)
        store = machine.start()
        store.host.memory = HostMemory(PageReport(PageKind.SMALL, PageKind.SMALL, ""))
        secret, other = Tenant(machine.service, SECRET), Tenant(machine.service, OTHER)
        with closing(secret), closing(other):
            await one_after_the_other(machine, store, secret, other)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


# --- core dumps


def mappings_of(pid: int) -> list[tuple[int, int, list[str]]]:
    """(start, end, flags) of every mapping of a process that can be read and is not of a file on a disk."""
    found: list[tuple[int, int, list[str]]] = []
    span: tuple[int, int] | None = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S)\S+ \S+ \S+ \d+ *(.*)", line):
            is_of_disk = match[4].startswith("/") and not match[4].startswith("/memfd:")
            is_kernels = match[4].startswith("[v")
            span = None if match[3] != "r" or is_of_disk or is_kernels else (int(match[1], 16), int(match[2], 16))
        elif line.startswith("VmFlags:") and span is not None:
            found.append((*span, line.split()[1:]))
    return found


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root sees into a daemon")
def test_weights_lie_in_no_memory_of_the_daemon_that_a_core_would_hold(tmp_path: Path) -> None:
    weights = torch.frombuffer(bytearray(POISON * 256), dtype=torch.float32)
    schema = ps.adamw_schema({"w": tuple(weights.shape)}, param_dtype="float32")
    with DaemonProcess(tmp_path / "store", "--host-budget", "64MiB", environment=QUIET) as daemon:
        with ps.connect(daemon.address) as store, store.create_namespace("moe", schema, layers=1, experts=4) as namespace:
            namespace.initialize(lambda key: {"w": weights})
            namespace.commit(1).wait()
            namespace.push({(0, 0): {"w": torch.ones_like(weights)}})
            namespace.apply(ps.AdamW(lr=0.0, weight_decay=0.0)).wait()
            namespace.commit(2).wait()
            namespace.acquire(namespace.keys()[:1]).release()
        kept, dumped = 0, []
        with open(f"/proc/{daemon.pid}/mem", "rb", buffering=0) as memory:
            for start, end, flags in mappings_of(daemon.pid):
                memory.seek(start)
                try:
                    has_weights = POISON in memory.read(end - start)
                except OSError:
                    continue  # a device's, or one that is gone
                if has_weights and VM_FLAGS_OF_NO_DUMP in flags:
                    kept += 1
                elif has_weights:
                    dumped.append(f"{start:x}-{end:x} {flags}")
    assert kept >= 2
    assert dumped == []


DUMPED = """
import os, resource, struct, sys
from paramstore.memory.arena import *
resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
pages = PageReport(PageKind.SMALL, PageKind.SMALL, "")
segments = [allocate(2 << 20, pages) for allocate in (allocate_shared, allocate_private, allocate_upload)]
for segment in segments:
    for offset in range(0, 1 << 16, 8):
        struct.pack_into("<Q", segment.view(offset, 8), 0, 0x11 * 0x0123456789abcd1)
plain = bytearray(1 << 16)
for offset in range(0, 1 << 16, 8):
    struct.pack_into("<Q", plain, offset, 0x11 * 0x0123456789abcd3)
os.abort()
"""


@pytest.mark.slow
@pytest.mark.skipif(not CORE_PATTERN.read_text().startswith("core"), reason="this machine gives cores to a program")
def test_no_segment_is_in_a_core(tmp_path: Path) -> None:
    if resource.getrlimit(resource.RLIMIT_CORE)[1] != resource.RLIM_INFINITY:
        pytest.skip("cores are limited here")
    done = subprocess.run([sys.executable, "-c", DUMPED], cwd=tmp_path, check=False, capture_output=True)
    assert done.returncode == -signal.SIGABRT, done.stderr.decode()
    (core,) = tmp_path.glob("core*")
    dumped = core.read_bytes()
    core.unlink()
    in_segments, in_plain = ((0x11 * number).to_bytes(8, "little") * 8 for number in (0x0123456789ABCD1, 0x0123456789ABCD3))
    assert in_plain in dumped
    assert in_segments not in dumped
