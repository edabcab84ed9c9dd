"""The daemon of a run lives while somebody has a session with it, however that ends; who comes at its end gets another."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import paramstore_client as client
from paramstore.core.schema import Schema
from paramstore.errors import StoreUnavailable, WriterFenced
from paramstore.holder import daemon_of
from paramstore.run import daemon as daemon_module
from paramstore.run.daemon import RunDaemon
from paramstore.run.home import Home
from paramstore.run.model import _check_nobody_imports
from paramstore_client.connection.autostart import started_in
from paramstore_client.running import find_daemon

pytestmark = pytest.mark.slow
LIMIT_S = 30.0
SCHEMA = Schema.param({"w": ((64,), "float32")})
OTHER_RUN = """
import sys
from pathlib import Path
from paramstore.run.daemon import RunDaemon
from paramstore.run.home import Home
directory = Path(sys.argv[1])
home = Home("m", directory, directory, "m", False)
with RunDaemon(home, host_budget="32MiB", default_budget_bytes=0, keeps=False, tell=print):
    print("up", flush=True)
    sys.stdin.read()
"""
"""A run of another process, as far as its daemon knows of it: until its input ends."""


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """The home of a store; no daemon runs in it at the end."""
    directory = tmp_path_factory.mktemp("h")
    yield Home("m", directory, directory / "s", "m", False)
    end(directory / "s", signal.SIGTERM)


def end(directory: Path, number: int = 0) -> None:
    """Returns when the daemon there has ended; asked to by signal `number`, where that is not 0."""
    if (found := find_daemon(directory / "run" / "paramstore.sock")) is not None:
        with found:
            if number:
                found.send(signal.Signals(number))
            assert found.has_ended(LIMIT_S)
    if (process := started_in(directory)) is not None:
        process.wait(LIMIT_S)


def of(home: Home, tell: Callable[[str], object] = print, *, keeps: bool = False) -> RunDaemon:
    return RunDaemon(home, host_budget="32MiB", default_budget_bytes=0, keeps=keeps, tell=tell)


def other_run(home: Home) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OTHER_RUN, str(home.directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_the_first_of_two_runs_leaves_the_daemon_to_the_second_and_a_killed_one_to_nobody(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one has no namespace open: it still loads."""
    monkeypatch.setattr(daemon_module, "NOTICE_TIMEOUT_S", 1.0)
    told: list[str] = []
    with of(home, told.append) as store:
        pid = store.stats()["daemon"]["pid"]
        second = other_run(home)
    assert told == [f"daemon {pid} stays while others use it, and ends by itself"]
    assert daemon_of(home.directory) == pid
    with client.connect(home.directory) as store:
        assert store.stats()["daemon"]["pid"] == pid
    second.kill()
    second.communicate()
    end(home.directory)
    assert daemon_of(home.directory) is None
    with of(home, told.append, keeps=True) as store:
        kept = store.stats()["daemon"]["pid"]
    assert told[1:] == [f"daemon {kept} stays, as --keep asks: `paramstore stop {home.directory}` ends it"]
    assert daemon_of(home.directory) == kept


def test_a_run_that_meets_a_daemon_which_is_just_ending_starts_its_own(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, pids = client.connect, list[int]()
    with ExitStack() as stack:
        pids.append(stack.enter_context(of(home, keeps=True)).stats()["daemon"]["pid"])
        process = started_in(home.directory)
        assert process is not None

        def connect_to_one_that_ends(**named: Any) -> client.Store:
            monkeypatch.setattr(client, "connect", connect)
            store = connect(**named)
            process.terminate()
            process.wait(LIMIT_S)
            return store

        monkeypatch.setattr(client, "connect", connect_to_one_that_ends)
        pids.append(stack.enter_context(of(home)).stats()["daemon"]["pid"])
        second = started_in(home.directory)
        assert second is not None
        second.terminate()  # not waited for: the next one meets it at whatever it is about
        pids.append(stack.enter_context(of(home)).stats()["daemon"]["pid"])
    assert len(set(pids)) == 3, pids
    assert daemon_of(home.directory) is None


def test_a_store_that_cannot_be_served_is_tried_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []

    def refuse(**named: object) -> None:
        tries.append(named)
        raise StoreUnavailable("no")

    monkeypatch.setattr(client, "connect", refuse)
    with pytest.raises(StoreUnavailable, match=r"^no$"), of(home):
        pass
    assert len(tries) == 1


def test_an_import_of_another_run_is_not_taken_over_and_goes_on(home: Home) -> None:
    with of(home) as store, client.connect(home.directory) as other:
        _check_nobody_imports(home, store)
        writer = other.create_namespace("m", SCHEMA, layers=[0], experts=2)
        with pytest.raises(WriterFenced, match=r"^another run imports .* \(namespace 'm'\), and goes on: give this command again"):
            _check_nobody_imports(home, store)
        writer.close()
        _check_nobody_imports(home, store)
