"""A real daemon for the tests that import and export."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import paramstore_client as ps
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

BUDGETS = ("--host-budget", "64MiB", "--gradient-budget", "8MiB")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with ForkedDaemon(tmp_path_factory.mktemp("imports") / "store", *BUDGETS) as daemon:
        yield daemon


@pytest.fixture
def small_experts_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a graph experts of any size are used where they lie."""
    monkeypatch.setattr("paramstore_client.hf.model.layer_experts.APART_BYTES", 0)


@pytest.fixture
def store(daemon: DaemonProcess) -> Iterator[ps.Store]:
    with ps.connect(daemon.address) as store:
        yield store
