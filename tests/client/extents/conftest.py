"""A served inference namespace whose extents may be leased, and what stands for kvikio."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore_client as ps
from paramstore_client.namespace import Namespace
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

EXPERTS = 4
FIELDS = {"w": ((700, 1024), torch.bfloat16), "b": ((7,), torch.uint8)}
"""A field of two chunks, and one that is no whole word."""
SETTINGS = {**QUIET, "PARAMSTORE_EXTENT_LEASES": "8"}


def value_of(key: tuple[int, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(key[1] + 1)
    return {
        "w": torch.randn(FIELDS["w"][0], generator=generator).bfloat16(),
        "b": torch.randint(0, 256, FIELDS["b"][0], dtype=torch.uint8, generator=generator),
    }


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    directory = tmp_path_factory.mktemp("extents") / "store"
    with ForkedDaemon(directory, "--host-budget", "64MiB", environment=SETTINGS) as served:
        with ps.connect(served.address) as store:
            made = store.create_namespace("m", ps.param_schema(FIELDS), layers=1, experts=EXPERTS)
            made.initialize(value_of)
            made.commit(1).wait()
            made.close()
        yield served


@pytest.fixture
def reader(daemon: DaemonProcess) -> Iterator[Namespace]:
    with ps.connect(daemon.address) as store:
        yield store.open_namespace("m")


@pytest.fixture
def volume(daemon: DaemonProcess) -> Path:
    """The file of the only volume."""
    (path,) = (daemon.directory / "volume").glob("*.data")
    return path


class FakeFuture:
    def __init__(self, count_bytes: int) -> None:
        self._count_bytes = count_bytes

    def get(self) -> int:
        return self._count_bytes


class FakeKvikio:
    """What `KvikioReads` uses of kvikio. spoil: called with what was read into, and how many reads there were before; returns the
    count of bytes that is claimed, or raises. settings: those in force at each read."""

    class CompatMode(Enum):
        OFF, ON, AUTO = range(3)

    def __init__(self, spoil: Callable[[Any, int], int] = lambda target, _: len(target)) -> None:
        self._spoil = spoil
        self.read_count = 0
        self.settings: list[dict[str, object]] = []
        self.defaults = self

    def set(self, settings: dict[str, object]) -> AbstractContextManager[None]:
        self.settings.append(settings)
        return nullcontext()

    def CuFile(self, path: str, flags: str) -> FakeKvikio:  # noqa: N802 - kvikio's name
        assert flags == "r"
        self._path = path
        return self

    def pread(self, target: Any, *, size: int, file_offset: int, task_size: int) -> FakeFuture:
        assert task_size >= size, "a task that fails leaves others writing"
        with open(self._path, "rb") as file:
            assert os.preadv(file.fileno(), [target], file_offset) == size
        self.read_count += 1
        return FakeFuture(self._spoil(target, self.read_count - 1))


@pytest.fixture
def fake_kvikio() -> Callable[..., FakeKvikio]:
    return FakeKvikio
