"""One daemon for all tests of a module; each test has a namespace of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

import paramstore_client as ps
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.toy_moe import make_namespace

SETTINGS = {**QUIET, "PARAMSTORE_WAIT_TIMEOUT_S": "20"}
_names = (f"moe{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def _small_tensors(one_thread: None) -> None:
    """Of all tests here."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    directory = tmp_path_factory.mktemp("training") / "store"
    with ForkedDaemon(directory, "--host-budget", "256MiB", environment=SETTINGS) as daemon:
        yield daemon


@pytest.fixture
def store(daemon: DaemonProcess) -> Iterator[ps.Store]:
    with ps.connect(daemon.address) as store:
        yield store


@pytest.fixture
def new_namespace(store: ps.Store) -> Callable[..., ps.Namespace]:
    """A namespace of the toy model's experts, committed as step 0."""

    def make(make_schema: Callable[..., ps.Schema] = ps.adamw_schema) -> ps.Namespace:
        return make_namespace(store, next(_names), make_schema)

    return make


@pytest.fixture
def namespace(new_namespace: Callable[..., ps.Namespace]) -> ps.Namespace:
    return new_namespace()
