"""Kill points: which call ends the process, and what is on the disk then."""

from __future__ import annotations

import fcntl
import inspect
import mmap
import os
import threading
from pathlib import Path

import pytest

from paramstore.storage.catalog.base import Change
from paramstore.testing.catalogs import namespace_row
from paramstore_testkit.processes import kill_points
from paramstore_testkit.processes.kill_points import KillableCatalog, KillableVolume, KillPoints


class Killed(Exception):
    """SIGKILL, as this test sees it."""


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> KillPoints:
    """The points of this process, which end nothing here."""

    def end(pid: int, number: int) -> None:
        raise Killed

    monkeypatch.setattr(os, "kill", end)
    monkeypatch.setattr(kill_points, "points", KillPoints())
    return kill_points.points


def write(volume: KillableVolume) -> None:
    page = memoryview(mmap.mmap(-1, 8192))
    page[:] = bytes([7]) * 8192
    volume.write(0, [page])


def first_bytes(volume: KillableVolume) -> tuple[int, int]:
    page = memoryview(mmap.mmap(-1, 8192))
    volume.read(0, [page])
    return page[0], page[4096]


@pytest.mark.parametrize(("kill_at", "found"), [(1, (0, 0)), (2, (7, 0))])
def test_a_write_is_missing_or_half_there(kill_at: int, found: tuple[int, int], kill: KillPoints, tmp_path: Path) -> None:
    volume = KillableVolume.create(tmp_path, index=0, size_bytes=1 << 20)
    kill.kill_at = kill_at
    with pytest.raises(Killed):
        write(volume)
    assert first_bytes(volume) == found
    volume.close()


def test_a_flush_is_a_point_and_zero_is_none(kill: KillPoints, tmp_path: Path) -> None:
    volume = KillableVolume.create(tmp_path, index=0, size_bytes=1 << 20)
    write(volume)
    volume.flush()
    assert first_bytes(volume) == (7, 7)
    kill.kill_at = 4
    with pytest.raises(Killed):
        volume.flush()
    volume.close()


@pytest.mark.parametrize(("kill_at", "names"), [(1, []), (2, ["moe"])])
def test_a_transaction_has_a_point_on_either_side(kill_at: int, names: list[str], kill: KillPoints, tmp_path: Path) -> None:
    catalog = KillableCatalog(tmp_path / "catalog", store_uuid=bytes(16))
    catalog.load()
    kill.kill_at = kill_at
    with pytest.raises(Killed):
        catalog.apply(Change(put_namespaces=(namespace_row(),)))
    catalog.reopen()
    assert list(catalog.load().namespaces) == names
    catalog.close()


def test_a_name_counts_its_own_points_alone(kill: KillPoints) -> None:
    kill.name, kill.kill_at = "cut.before", 2
    for name in ("write", "cut.before", "cut.after", "publish"):
        kill.reach(name)
    assert kill.is_next("cut.before")
    with pytest.raises(Killed):
        kill.reach("cut.before")


def test_an_instrumented_function_has_a_point_on_either_side(kill: KillPoints, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(KillPoints, "reach", lambda self, name: seen.append(name))
    function = kill_points._between_points(lambda value: seen.append(value), "note")
    function("works")
    assert seen == ["note.before", "works", "note.after"]


def test_every_named_step_of_the_daemon_is_there() -> None:
    for name, (owner, attribute) in kill_points.WRAPPED.items():
        assert callable(getattr(owner, attribute)), name
        assert not inspect.iscoroutinefunction(getattr(owner, attribute)), f"{name}: its end would be missed"


def test_a_gate_holds_whoever_comes_to_it_while_its_lock_is_held(tmp_path: Path) -> None:
    path = tmp_path / "gate"
    path.touch()
    points = KillPoints(gates={"read": path})
    points.reach("read")  # nobody holds it
    with path.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        passed = threading.Event()
        thread = threading.Thread(target=lambda: (points.reach("read"), passed.set()))
        thread.start()
        points.reach("write")
        assert not passed.wait(0.05)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert passed.wait(5.0)
        thread.join()
