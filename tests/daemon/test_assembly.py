"""Opening a store with its real parts: all or nothing, and the same store again the next time."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import stat
from pathlib import Path

import pytest

from paramstore.config import Config
from paramstore.core.schema import Schema
from paramstore.daemon import assembly
from paramstore.daemon.assembly import take_lock
from paramstore.engine.store import Store
from paramstore.errors import CatalogError, ConfigError, StoreLocked, VolumeError
from paramstore.fsck import check
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog
from paramstore.storage.volume.backing_file import volume_path
from paramstore_testkit.stores.assembled import MIB, config, with_store

SCHEMA = Schema.adamw({"w": (8, 8)}, param_dtype="float32")
LIMIT_S = 20.0


async def nothing(store: Store) -> None:
    """Opening is all that is asked for."""


async def identity(store: Store) -> bytes:
    return store.store_uuid


async def create(store: Store) -> None:
    await store.admission.create("moe", SCHEMA.describe(), layers=[0], experts=2, host_bytes=None)


async def create_and_commit(store: Store) -> None:
    view = await store.admission.create("moe", SCHEMA.describe(), layers=[0], experts=2, host_bytes=None)
    await store.initializer.begin(view)
    for expert in range(2):
        await store.initializer.put(view, (0, expert), memoryview(mmap.mmap(-1, SCHEMA.initial_bytes)))
    await store.initializer.end(view)
    await store.committer.commit(view, 1, b"")


def opens(settings: Config) -> None:
    with_store(settings, nothing)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_new_directory_becomes_a_store_for_its_user_alone(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    opens(config(directory))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "volume").stat().st_mode) == 0o700
    volume = volume_path(directory / "volume", 0)
    assert stat.S_IMODE(volume.stat().st_mode) == 0o600
    assert stat.S_IMODE((directory / "catalog").stat().st_mode) == 0o700


def test_a_new_store_is_in_the_log_with_its_volumes_and_an_old_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = config(Path("store"), volumes=(tmp_path / "a", tmp_path / "b"))
    with caplog.at_level(logging.INFO):
        opens(settings)
        assert f"made a new store in {tmp_path}/store, with volume 0 in {tmp_path}/a, volume 1 in {tmp_path}/b" in caplog.messages
        caplog.clear()
        opens(settings)
    assert "new store" not in caplog.text


def test_a_directory_without_its_parent_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    for settings in (config(tmp_path / "typo" / "store"), config(tmp_path, volumes=(tmp_path / "a", tmp_path / "typo" / "b"))):
        with pytest.raises(ConfigError, match=f"there is no directory {tmp_path}/typo; the nearest one is {tmp_path}:"):
            opens(settings)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["typo/b", "file", "file/b", "foreign", "closed"])
def test_a_new_store_whose_volume_cannot_be_made_leaves_nothing(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir()
    opens(config(tmp_path / "other", volumes=(tmp_path / "foreign",)))
    may, before = os.access, sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "closed" and may(path, mode))  # root may all
    with pytest.raises((ConfigError, VolumeError), match=f"volume [01].*{tmp_path / wrong}"):
        opens(config(tmp_path / "store", volumes=(tmp_path / "a", tmp_path / wrong)))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_volume_in_the_new_store_s_own_directory_is_made_however_it_is_spelled(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    opens(config(tmp_path / "store", volumes=(tmp_path / "link" / "store" / "inside",)))
    assert (tmp_path / "store" / "inside").is_dir()


def test_the_same_directory_is_the_same_store(tmp_path: Path) -> None:
    first = with_store(config(tmp_path), identity)
    assert with_store(config(tmp_path), identity) == first


def test_what_was_created_is_there_again(tmp_path: Path) -> None:
    async def names(store: Store) -> list[str]:
        return list(store.namespaces)

    with_store(config(tmp_path), create)
    assert with_store(config(tmp_path), names) == ["moe"]


def test_closing_gives_every_descriptor_back(tmp_path: Path) -> None:
    opens(config(tmp_path))
    before = open_descriptors()
    opens(config(tmp_path))
    assert open_descriptors() == before


def test_a_directory_that_is_a_file_is_a_setting_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        take_lock(config(tmp_path / "file"))


def test_a_locked_directory_is_refused(tmp_path: Path) -> None:
    lock = take_lock(config(tmp_path))
    try:
        with pytest.raises(StoreLocked):
            take_lock(config(tmp_path))
    finally:
        lock.release()


def test_a_start_without_the_catalog_is_refused_names_the_repair_and_makes_no_catalog(tmp_path: Path) -> None:
    opens(config(tmp_path))
    shutil.rmtree(tmp_path / "catalog")
    before = volume_path(tmp_path / "volume", 0).read_bytes()
    for _ in range(2):
        with pytest.raises(VolumeError, match="if its catalog was lost: paramstore fsck --dir DIR --rebuild"):
            opens(config(tmp_path))
        assert not (tmp_path / "catalog").exists()
    assert volume_path(tmp_path / "volume", 0).read_bytes() == before
    assert check.rebuild(tmp_path, [str(tmp_path / "volume")]).is_rebuilt
    opens(config(tmp_path))


def test_a_start_with_a_blank_catalog_is_refused_with_the_repair_too(tmp_path: Path) -> None:
    opens(config(tmp_path))
    shutil.rmtree(tmp_path / "catalog")
    LmdbCatalog(tmp_path / "catalog", store_uuid=bytes(16)).close()
    with pytest.raises(VolumeError, match="fsck --dir DIR --rebuild"):
        opens(config(tmp_path))
    assert check.rebuild(tmp_path, [str(tmp_path / "volume")]).is_rebuilt
    opens(config(tmp_path))


def test_a_host_budget_above_the_machines_memory_is_in_the_log_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    opens(config(tmp_path, host_budget_bytes=memory_bytes))
    assert "host_budget" not in caplog.text
    opens(config(tmp_path, host_budget_bytes=memory_bytes + 1))
    assert f"host_budget_bytes={memory_bytes + 1} " in caplog.text


def test_a_truncated_volume_is_refused_with_both_sizes(tmp_path: Path) -> None:
    with_store(config(tmp_path), create)
    file = volume_path(tmp_path / "volume", 0)
    size_bytes = file.stat().st_size
    os.truncate(file, size_bytes - MIB)
    with pytest.raises(VolumeError, match=f"truncated: {size_bytes - MIB} bytes, expected {size_bytes}"):
        opens(config(tmp_path))


def test_a_catalog_that_is_not_one_is_refused(tmp_path: Path) -> None:
    opens(config(tmp_path))
    (tmp_path / "catalog" / "data.mdb").write_bytes(b"not a catalog" * 1000)
    with pytest.raises(CatalogError, match="catalog"):
        opens(config(tmp_path))


def test_a_catalog_row_that_is_wrong_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens(config(tmp_path))

    def load(catalog: LmdbCatalog) -> None:
        raise CatalogError("a row is wrong")

    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(LmdbCatalog, "load", load)
        with pytest.raises(CatalogError):
            opens(config(tmp_path))
    assert open_descriptors() == before


@pytest.mark.parametrize("failing", ["probe_pages", "adopt_new_volumes", "connect"])
def test_a_part_that_refuses_leaves_nothing_open(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens(config(tmp_path / "warm"))

    def refuse(*arguments: object, **named: object) -> None:
        raise VolumeError("refused")

    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(assembly, failing, refuse)
        with pytest.raises(VolumeError, match="refused"):
            opens(config(tmp_path / "store"))
    assert open_descriptors() == before
    opens(config(tmp_path / "store"))


def test_a_second_volume_that_refuses_leaves_the_first_closed(tmp_path: Path) -> None:
    opens(config(tmp_path / "warm"))
    (tmp_path / "b").touch()
    before = open_descriptors()
    with pytest.raises(VolumeError, match="volume 1"):
        opens(config(tmp_path / "store", volumes=(tmp_path / "a", tmp_path / "b")))
    assert open_descriptors() == before
