"""Who may reach what of a store: exact modes whatever the umask, and the matrix of users and places."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.processes.other_user import Act, command, outcomes

pytestmark = pytest.mark.slow

NOBODY, STRANGER = 65534, 65533
FILES = ("lock", "catalog/data.mdb", "catalog/lock.mdb", "volume/volume-000.data")
DIRECTORIES = (".", "run", "catalog", "volume")
SOCKET = "run/paramstore.sock"
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be other users")


@pytest.fixture
def owner() -> int:
    return NOBODY if os.getuid() == 0 else os.getuid()


@pytest.fixture
def daemon(common_place: Path, owner: int) -> Iterator[DaemonProcess]:
    """A daemon of an ordinary user, started with umask 0."""
    with DaemonProcess(common_place / "store", command=command(owner)) as daemon:
        yield daemon


def acts_on(directory: Path) -> list[Act]:
    acts: list[Act] = [("talk", str(directory / SOCKET))]
    acts += [(act, str(directory / name)) for name in FILES for act in ("read", "write")]
    acts += [(act, str(directory / name)) for name in DIRECTORIES for act in ("list", "make")]
    return acts


def test_everything_of_a_store_has_the_mode_it_should_whatever_the_umask(daemon: DaemonProcess, owner: int) -> None:
    found = {path.relative_to(daemon.directory).as_posix(): path.lstat() for path in daemon.directory.rglob("*")}
    found["."] = daemon.directory.lstat()
    assert {*FILES, *DIRECTORIES, SOCKET} <= found.keys()
    wanted = {name: 0o700 if stat.S_ISDIR(status.st_mode) else 0o600 for name, status in found.items()}
    assert {name: stat.S_IMODE(status.st_mode) for name, status in found.items()} == wanted
    assert {status.st_uid for status in found.values()} == {owner}


def test_its_own_user_reaches_everything(daemon: DaemonProcess, owner: int) -> None:
    """Else the other tests would prove nothing."""
    assert set(outcomes(owner, acts_on(daemon.directory))) == {"done"}


@needs_root
def test_another_user_reaches_nothing_and_root_all(daemon: DaemonProcess) -> None:
    acts = acts_on(daemon.directory)
    reached = {act: found for act, found in zip(acts, outcomes(STRANGER, acts), strict=True) if found != "EACCES"}
    assert reached == {}
    assert set(outcomes(0, acts)) == {"done"}


@needs_root
def test_another_user_is_hung_up_on_where_every_mode_was_opened(daemon: DaemonProcess) -> None:
    """The kernel says who he is: no mode of a file has a part in it."""
    for path in (daemon.directory, *daemon.directory.rglob("*")):
        path.chmod(0o777)
    acts = acts_on(daemon.directory)
    talk, *files = outcomes(STRANGER, acts)
    assert talk in ("ECONNRESET", "EPIPE")
    assert set(files) == {"done"}
    assert f"of uid {STRANGER}" in daemon.stderr
