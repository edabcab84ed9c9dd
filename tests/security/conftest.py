"""A real daemon over a small trained store, and places that every user of this machine can reach."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.wire.raw_client import RawClient

NAME = "moe"
SHAPE = (64, 64)
EXPERTS = 4
BUDGETS = ("--host-budget", "64MiB", "--gradient-budget", "4MiB")
ENVIRONMENT = {**QUIET, "PARAMSTORE_READER_SLOTS": "5"}
NOBODY = 65534


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a store with the namespace `moe` at step 1, which nobody serves: to be copied."""
    directory = tmp_path_factory.mktemp("template") / "store"
    with DaemonProcess(directory, *BUDGETS, environment=ENVIRONMENT) as daemon, ps.connect(daemon.address) as store:
        schema = ps.adamw_schema({"w": SHAPE}, param_dtype="float32")
        with store.create_namespace(NAME, schema, layers=1, experts=EXPERTS) as namespace:
            namespace.initialize(lambda key: {"w": torch.full(SHAPE, 1.0 + key[1])})
            namespace.commit(1).wait()
    return directory


@pytest.fixture
def directory(template: Path, tmp_path: Path) -> Path:
    """A copy of the template, to be spoilt."""
    shutil.copytree(template, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture(scope="module")
def daemon(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for all tests of a module. Each of them ends in it serving still."""
    directory = tmp_path_factory.mktemp("served") / "store"
    shutil.copytree(template, directory)
    with DaemonProcess(directory, *BUDGETS, environment=ENVIRONMENT) as daemon:
        yield daemon


@pytest.fixture
def served(daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    """The daemon, and whoever behaves is served before and after as if nothing were."""
    with ps.connect(daemon.address) as store, store.open_namespace(NAME) as reader, reader.acquire([(0, 3)]) as lease:
        yield daemon
        assert torch.equal(lease[0, 3]["w"], torch.full(SHAPE, 4.0))
        with ps.connect(daemon.address) as another, another.open_namespace(NAME) as again:
            assert torch.equal(again.read((0, 2))["master/w"], torch.full(SHAPE, 3.0))
        assert store.stats()["daemon"]["pid"] == daemon.pid
    assert [line for line in daemon.stderr.splitlines() if " ERROR " in line] == []


@pytest.fixture
def common_place() -> Iterator[Path]:
    """A directory of its user (root: of nobody) that all may enter: pytest's own are closed to others."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    if os.getuid() == 0:
        os.chown(directory, NOBODY, NOBODY)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def clients() -> Iterator[list[RawClient]]:
    """Whatever is put here is closed."""
    made: list[RawClient] = []
    yield made
    for client in made:
        client.close()
