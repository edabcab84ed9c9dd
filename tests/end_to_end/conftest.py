"""Real daemons over small trained stores, and the checks that hold whatever goes wrong beside them."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore.core.key import ExpertKey
from paramstore_client.connection import autostart
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

SHAPE = (64, 64)
LAYERS, EXPERTS = 2, 4
SETTINGS = {
    **QUIET, "PARAMSTORE_WAIT_TIMEOUT_S": "10", "PARAMSTORE_SHUTDOWN_TIMEOUT_S": "5", "PARAMSTORE_READER_SLOTS": "8",
}  # fmt: skip
BUDGETS = ("--host-budget", "64MiB", "--gradient-budget", "4MiB")
LIMIT_S = 60.0
"""Longer than any deadline in these tests: what takes longer hangs."""

Value = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def value_of() -> Callable[[ExpertKey], Value]:
    """The value of a key at step 1: random, so that its bytes are found on a volume at one place only."""

    def value(key: ExpertKey) -> Value:
        generator = torch.Generator().manual_seed(100 * key[0] + key[1] + 1)
        return {"w": torch.randn(SHAPE, generator=generator)}

    return value


@pytest.fixture(scope="session")
def fill(value_of: Callable[[ExpertKey], Value]) -> Callable[[ps.Store], None]:
    """Makes the namespace `moe` in a store, committed at step 1."""

    def make(store: ps.Store) -> None:
        schema = ps.adamw_schema({"w": SHAPE}, param_dtype="float32")
        with store.create_namespace("moe", schema, layers=LAYERS, experts=EXPERTS) as namespace:
            namespace.initialize(value_of)
            namespace.commit(1, b"first").wait()

    return make


@pytest.fixture(scope="session")
def template(fill: Callable[[ps.Store], None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a store at step 1 that nobody serves: to be copied."""
    directory = tmp_path_factory.mktemp("template") / "store"
    with ForkedDaemon(directory, *BUDGETS, environment=SETTINGS) as daemon, ps.connect(daemon.address) as store:
        fill(store)
    return directory


@pytest.fixture
def directory(template: Path, tmp_path: Path) -> Path:
    """A copy of the template, to be spoilt."""
    shutil.copytree(template, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Returns when a condition holds that another process brings about; asking it is what takes the time."""

    def wait(condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + LIMIT_S / 2
        while not condition():
            assert time.monotonic() < deadline_s, "it did not come about"

    return wait


@pytest.fixture
def serve() -> Iterator[Callable[..., DaemonProcess]]:
    """Makes daemons, none of which outlives the test."""
    daemons: list[DaemonProcess] = []

    def make(directory: Path, *arguments: str, **settings: str) -> DaemonProcess:
        daemons.append(ForkedDaemon(directory, *(arguments or BUDGETS), environment={**SETTINGS, **settings}))
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.stop()


@pytest.fixture(scope="module")
def daemon(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for all tests of a module that leave its store at step 1."""
    directory = tmp_path_factory.mktemp("shared") / "store"
    shutil.copytree(template, directory)
    with ForkedDaemon(directory, *BUDGETS, environment=SETTINGS) as daemon:
        yield daemon


@pytest.fixture
def in_time() -> Iterator[None]:
    """Nothing hangs past its deadline."""
    started_s = time.monotonic()
    yield
    assert time.monotonic() - started_s < LIMIT_S


@pytest.fixture
def bystander(daemon: DaemonProcess, value_of: Callable[[ExpertKey], Value]) -> Iterator[None]:
    """A reader that leases, reads and asks before and after: it must see nothing of what happens between."""
    key = (0, 3)
    with ps.connect(daemon.address) as store, store.open_namespace("moe") as reader, reader.acquire([key]) as lease:
        before = lease.clone()[key]["w"]
        assert torch.equal(before, value_of(key)["w"])
        yield
        assert torch.equal(lease[key]["w"], before)
        with reader.acquire([(1, 0)], timeout_s=5.0) as again:
            assert torch.equal(again[1, 0]["w"], value_of((1, 0))["w"])
        assert reader.steps() == [1]
        assert store.stats()["namespaces"]["moe"]["broken"] is None


@pytest.fixture
def store(daemon: DaemonProcess, bystander: None) -> Iterator[ps.Store]:
    """A client of the shared daemon, with the bystander beside it."""
    with ps.connect(daemon.address) as store:
        yield store


@pytest.fixture
def writer(store: ps.Store) -> Iterator[ps.Namespace]:
    """The writer of the shared daemon's namespace; what it did is rolled back by the next one."""
    with store.open_namespace("moe", mode="write") as namespace:
        yield namespace


@pytest.fixture(scope="module")
def autostarting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ps.ServeOptions]:
    """A daemon for all tests of a module, which the first connect starts."""
    settings = {name.removeprefix("PARAMSTORE_").lower(): value for name, value in QUIET.items()}
    yield ps.ServeOptions(dir=tmp_path_factory.mktemp("store"), host_budget="256MiB", settings=settings)
    for process in autostart._started:
        process.terminate()
        process.wait(timeout=60)
    autostart._started.clear()


@pytest.fixture(params=[16])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 16 MiB, or of as many as the test says."""
    place = tmp_path / "disk"
    place.mkdir()
    options = f"size={request.param}m"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "paramstore-test", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)
