"""Kill points: which call ends the process, and what is on the disk then."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from paramstore.storage.catalog import Change
from paramstore.testing import kill_points
from paramstore.testing.catalogs import namespace_row
from paramstore.testing.kill_points import KillableCatalog, KillableVolume, KillPoints


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
