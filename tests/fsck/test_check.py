"""A run over a directory: locked, without a trace, and a rebuild that writes nothing where it cannot help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paramstore.errors import CatalogError, ConfigError, StoreLocked, VolumeError
from paramstore.fsck.check import check, examine, read_catalog, rebuild
from paramstore.fsck.disks import volume_file
from paramstore.storage.catalog import Change, NamespaceRow, VolumeRow
from paramstore.storage.format import Superblock
from paramstore.storage.lmdb_catalog import LmdbCatalog
from paramstore.storage.lock import StoreLock
from paramstore.storage.notes import format_volume
from paramstore.testing.machine import Machine
from paramstore.testing.memory_disk import eventful, survey_of
from paramstore.testing.small_store import create, run
from paramstore.testing.volumes import MemoryVolume

STORE, VOLUME = b"s" * 16, b"v" * 16
SIZE_BYTES = 4 << 20


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store of one volume and a namespace without a commit, that nobody serves."""
    volume = MemoryVolume(SIZE_BYTES)
    format_volume(volume, Superblock(STORE, VOLUME, 0, note_slots=4))
    buffer = bytearray(SIZE_BYTES)
    volume.read(0, [memoryview(buffer)])
    (tmp_path / "volume").mkdir()
    volume_file(tmp_path / "volume", 0).write_bytes(buffer)
    catalog = LmdbCatalog(tmp_path / "catalog", store_uuid=STORE)
    catalog.load()
    schema: dict[str, object] = {"kind": "param", "fields": [["w", [4], "uint8"]], "gradient_dtype": ""}
    row = NamespaceRow("moe", schema, (0,), 1, epoch=1, sequence=0)
    catalog.apply(Change(put_namespaces=(row,), put_volumes=(VolumeRow(0, VOLUME, SIZE_BYTES, 0),)))
    catalog.close()
    return tmp_path


def volumes(directory: Path) -> list[str]:
    return [str(directory / "volume")]


def everything(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_looking_leaves_no_trace_not_even_a_lock_file(directory: Path) -> None:
    before = everything(directory)
    assert check(directory, volumes(directory)).findings == []
    assert everything(directory) == before


def test_a_pmem_volume_is_read_as_a_file(directory: Path) -> None:
    assert check(directory, [f"pmem:{directory / 'volume'}"]).findings == []


@pytest.mark.parametrize("run_it", [check, rebuild])
def test_a_store_in_use_is_refused_with_the_process(directory: Path, run_it: type) -> None:
    lock = StoreLock.take(directory)
    before = everything(directory)
    with pytest.raises(StoreLocked, match="in use by process"):
        run_it(directory, volumes(directory))
    assert everything(directory) == before
    lock.release()
    run_it(directory, volumes(directory))


def test_while_it_looks_no_daemon_gets_the_store(directory: Path) -> None:
    StoreLock.take(directory).release()

    def try_to_serve(_: int) -> None:
        with pytest.raises(StoreLocked):
            StoreLock.take(directory)

    check(directory, volumes(directory), try_to_serve)
    StoreLock.take(directory).release()


@pytest.mark.parametrize("run_it", [check, rebuild])
def test_a_directory_that_is_not_there_is_a_usage_error_and_is_not_made(tmp_path: Path, run_it: type) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        run_it(tmp_path / "none", [])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("run_it", [check, rebuild])
def test_a_volume_that_is_not_there_is_named(directory: Path, run_it: type) -> None:
    with pytest.raises(VolumeError, match="volume 1 "):
        run_it(directory, [*volumes(directory), str(directory / "none")])


def test_a_damaged_catalog_is_a_finding(directory: Path) -> None:
    (directory / "catalog" / "data.mdb").write_bytes(b"garbage" * 4096)
    report = check(directory, volumes(directory))
    assert report.contents is None
    assert "catalog" in report.findings[0].what


def test_a_missing_catalog_is_a_finding_and_a_rebuild_makes_one(directory: Path) -> None:
    (directory / "catalog" / "data.mdb").unlink()
    assert "cannot be read" in check(directory, volumes(directory)).findings[0].what
    report = rebuild(directory, volumes(directory))
    assert report.is_rebuilt
    contents = read_catalog(directory / "catalog")
    assert (contents.store_uuid, list(contents.volumes), contents.namespaces) == (STORE, [0], {})


def test_a_rebuild_says_which_namespace_only_the_old_catalog_knew(directory: Path) -> None:
    report = rebuild(directory, volumes(directory))
    assert [(one.namespace, one.what) for one in report.lost] == [("moe", "it has no commit, so that only the catalog knows of it")]
    assert report.old_catalog is not None
    assert list(read_catalog(report.old_catalog).namespaces) == ["moe"]


def test_where_nothing_can_be_rebuilt_the_reason_is_a_finding_and_all_is_as_before(directory: Path) -> None:
    StoreLock.take(directory).release()
    volume_file(directory / "volume", 0).write_bytes(bytes(SIZE_BYTES))
    before = everything(directory)
    report = rebuild(directory, volumes(directory))
    assert (report.is_rebuilt, report.old_catalog) == (False, None)
    assert "no store is known" in report.findings[-1].what
    assert {path.name for path, data in everything(directory).items() if before.get(path) != data} <= {"lock"}


def test_a_catalog_is_read_from_a_copy(directory: Path) -> None:
    before = everything(directory)
    assert list(read_catalog(directory / "catalog").namespaces) == ["moe"]
    assert everything(directory) == before
    with pytest.raises(CatalogError, match="cannot be read"):
        read_catalog(directory / "none")


def test_without_a_catalog_whatever_no_rebuild_could_bring_back_is_a_finding() -> None:
    async def scenario() -> None:
        machine = Machine(seed=3)
        await eventful(machine)
        store = machine.store
        assert store is not None
        young = await create(store, "young", step=None)
        await store.write_back(young, None)
        report = examine(survey_of(machine), None, "it is gone")
        assert [(one.namespace, one.what) for one in report.findings] == [
            (None, "it is gone"), ("young", "there are records of it, but no commit note: no step of it is known"),
        ]  # fmt: skip
        contents = machine.catalog.load()
        assert examine(survey_of(machine), contents).findings == []
        await machine.crash()

    run(scenario())


def test_a_step_that_only_the_catalog_knows_is_lost_to_a_rebuild() -> None:
    async def scenario() -> None:
        machine = Machine(seed=3)
        await eventful(machine)
        await machine.crash()
        contents = machine.catalog.load()
        found = survey_of(machine)
        found.notes = [one for one in found.notes if one.note.namespace == "moe"]
        lost = examine(found, contents).lost
        assert [(one.namespace, one.step) for one in lost] == [("eval", None), ("eval", 3)]

    run(scenario())


def test_two_steps_never_share_a_note_slot_in_a_report() -> None:
    async def scenario() -> None:
        machine = Machine(seed=3)
        await eventful(machine)
        await machine.crash()
        found = survey_of(machine)
        taken = next(one.slot for one in found.notes if (one.note.namespace, one.note.step) == ("moe", 7))
        found.notes = [replace(one, slot=taken) if one.note.namespace == "eval" else one for one in found.notes]
        proofs = examine(found, None).proofs
        assert (sorted(proofs["moe"].steps), sorted(proofs["eval"].steps)) == ([4, 9], [3])

    run(scenario())
