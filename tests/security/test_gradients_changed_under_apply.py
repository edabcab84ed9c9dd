"""A client that scribbles on its gradients while they are applied harms the one record they are of, and no other.

It scribbles from this process, the daemon reads in its own: both at once, on the same pages. (userfaultfd would stop no read of
the daemon: it tells of faults in the mappings of the process that asked for it.)
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore_client as ps
from paramstore.core.schema import Schema
from paramstore.wire import messages as m
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.wire.raw_client import RawClient

pytestmark = pytest.mark.slow

NAME, SHAPE, EXPERTS = "moe", (512, 512), 4
SCHEMA = Schema.adamw({"w": SHAPE}, param_dtype="float32")
VICTIM = (0, 1)
OTHERS = tuple((0, expert) for expert in range(EXPERTS) if expert != VICTIM[1])
ROUNDS = 12
"""At least so many applies; more, until one has read a gradient that was half of one kind and half of the other."""
LIMIT_S = 60.0
PUNCH_HOLE = 0x02 | 0x01
SCRIBBLES = {
    "zeros and ones": (bytes(SCHEMA.gradient_bytes), torch.ones(SCHEMA.gradient_bytes // 4).numpy().tobytes()),
    "no numbers": (b"\xff" * SCHEMA.gradient_bytes, b"\x7f\x80\x00\x00" * (SCHEMA.gradient_bytes // 4)),
}


def expected(count: int) -> torch.Tensor:
    """The masters after `count` applies of gradients of ones."""
    parameter = torch.nn.Parameter(torch.full(SHAPE, 2.0))
    optimizer = torch.optim.AdamW([parameter], lr=0.5, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, fused=True)
    for _ in range(count):
        parameter.grad = torch.ones(SHAPE)
        optimizer.step()
    return parameter.detach()


def is_mixed(reader: ps.Namespace) -> bool:
    """Whether an apply has met two gradients in one: whole ones, all of one number, leave the victim's master all of one number.

    How often that happens depends on how the machine shares its cores out between the one that writes and the one that reads.
    """
    reader.refresh()
    master = reader.read(VICTIM)["master/w"]
    return bool((master != master.flatten()[0]).any())


@contextmanager
def scribbling(memory: mmap.mmap, start: int, values: tuple[bytes, ...], fd: int) -> Iterator[None]:
    """Meanwhile a thread overwrites one gradient without end, punches holes in it, and tries to cut the memory off."""
    stop = threading.Event()
    libc = ctypes.CDLL(None)

    def scribble() -> None:
        while not stop.is_set():
            for value in values:
                memory[start : start + len(value)] = value
            libc.fallocate(fd, ctypes.c_int(PUNCH_HOLE), ctypes.c_long(start), ctypes.c_long(len(values[0])))
            libc.ftruncate(fd, ctypes.c_long(0))

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Scribbler:
    """The writer, at the level of messages: it keeps the descriptor of its upload memory, which ours does not."""

    def __init__(self, path: Path) -> None:
        self.client = RawClient.connect(path)
        self.handle = self.segment = self.fd = 0
        self.memory: mmap.mmap

    async def begin(self) -> None:
        await self.client.hello()
        opened = await self.client.request(m.OpenNamespace, NAME, "write")
        self.handle = opened["handle"]
        uploaded: m.Uploaded = await self.client.request(m.OpenUpload, EXPERTS * SCHEMA.gradient_bytes)
        self.segment, self.fd = uploaded.segment, self.client.fds.pop()
        self.memory = mmap.mmap(self.fd, uploaded.length_bytes)

    async def round(self, step: int, values: tuple[bytes, ...]) -> dict[str, Any]:
        ones = torch.ones(SCHEMA.gradient_bytes // 4).numpy().tobytes()
        places = {(0, expert): expert * SCHEMA.gradient_bytes for expert in range(EXPERTS)}
        for key in OTHERS:
            self.memory[places[key] : places[key] + len(ones)] = ones
        await self.client.request(m.Push, self.handle, [(*key, self.segment, place) for key, place in places.items()])
        with scribbling(self.memory, places[VICTIM], values, self.fd):
            await self.client.request(m.GradientNorm, self.handle)
            applied: dict[str, Any] = await self.client.request(m.Apply, self.handle, 0.5, 0.9, 0.99, 1e-8, 0.0, 1.0)
        await self.client.request(m.Commit, self.handle, step)
        return applied

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)
        self.client.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "store", "--host-budget", "64MiB", "--gradient-budget", "32MiB", environment=QUIET) as daemon:
        with ps.connect(daemon.address) as store:
            schema = ps.adamw_schema({"w": SHAPE}, param_dtype="float32")
            with store.create_namespace(NAME, schema, layers=1, experts=EXPERTS) as namespace:
                namespace.initialize(lambda key: {"w": torch.full(SHAPE, 2.0)})
                namespace.commit(1).wait()
        yield daemon


@pytest.mark.parametrize("values", SCRIBBLES.values(), ids=SCRIBBLES)
def test_the_daemon_lives_and_all_other_records_are_exact(values: tuple[bytes, ...], daemon: DaemonProcess) -> None:
    rounds = 0

    async def scenario(reader: ps.Namespace) -> None:
        nonlocal rounds
        scribbler = Scribbler(daemon.socket)
        await scribbler.begin()
        while rounds < ROUNDS or not is_mixed(reader):
            assert (await scribbler.round(2 + rounds, values))["records"] == EXPERTS
            rounds += 1
        scribbler.close()

    with ps.connect(daemon.address) as store, store.open_namespace(NAME) as reader:
        asyncio.run(asyncio.wait_for(scenario(reader), LIMIT_S))  # its end: no gradient changed while it was read
    wanted = expected(rounds)
    with ps.connect(daemon.address) as store, store.open_namespace(NAME) as reader:
        assert reader.view_step == 1 + rounds
        for key in OTHERS:
            assert torch.equal(reader.read(key)["master/w"], wanted), key
        with reader.acquire([VICTIM]) as lease:
            found = reader.read(VICTIM)  # whole: every checksum of it matches
            assert lease[VICTIM]["w"].numpy().tobytes() == found["master/w"].numpy().tobytes()
        if values is SCRIBBLES["zeros and ones"]:
            assert found["master/w"].isfinite().all()
        verified = store.verify(NAME).wait()
        assert (verified["found"], verified["records"] > 0) == (0, True)
    assert [line for line in daemon.stderr.splitlines() if " ERROR " in line] == []
