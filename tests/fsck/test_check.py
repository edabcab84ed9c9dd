"""A run over a directory: locked, without a trace, and a rebuild that writes nothing where it cannot help."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from paramstore.errors import CatalogError, ConfigError, StoreLocked, VolumeError
from paramstore.fsck.check import check, examine, layouts_of, rebuild, total_bytes
from paramstore.fsck.disks import volume_file
from paramstore.fsck.reader import SUPERBLOCK_AT
from paramstore.fsck.rebuild import new_contents, restore_notes
from paramstore.fsck.survey import survey
from paramstore.storage.catalog.base import Change, Contents, NamespaceContents, NamespaceRow, VolumeRow
from paramstore.storage.catalog.copied import read_catalog
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog
from paramstore.storage.format.notes import format_volume
from paramstore.storage.format.structures import Superblock
from paramstore.storage.lock import StoreLock
from paramstore.testing.volumes import MemoryVolume, keep_random
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.memory_disk import MemoryDisk, commit, disks_of, eventful, survey_of
from paramstore_testkit.stores.small_store import create, keys_of, run, train

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
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="it is not a directory"):
        run_it(tmp_path / "file", [])


@pytest.mark.parametrize("run_it", [check, rebuild])
def test_a_directory_without_a_store_is_a_usage_error_and_stays_as_it_is(directory: Path, tmp_path: Path, run_it: type) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"there is no store: it has no catalog, and no volume is in {tmp_path}/a, pmem:b$"):
        run_it(tmp_path / "empty", [str(tmp_path / "a"), "pmem:b"])
    assert list((tmp_path / "empty").iterdir()) == []
    assert run_it(tmp_path / "empty", volumes(directory)).found.store == STORE, "one that has lost its catalog is a store"


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


def test_a_namespace_without_a_commit_that_only_the_old_catalog_knew_is_taken_over(directory: Path) -> None:
    report = rebuild(directory, volumes(directory))
    assert report.lost == []
    assert report.old_catalog is not None
    (old,), (new,) = (read_catalog(path).namespaces.values() for path in (report.old_catalog, directory / "catalog"))
    assert new.namespace == replace(old.namespace, epoch=old.namespace.epoch + 1)


def test_where_nothing_can_be_rebuilt_the_reason_is_a_finding_and_all_is_as_before(directory: Path) -> None:
    StoreLock.take(directory).release()
    volume_file(directory / "volume", 0).write_bytes(bytes(SIZE_BYTES))
    before = everything(directory)
    report = rebuild(directory, volumes(directory))
    assert (report.is_rebuilt, report.old_catalog) == (False, None)
    assert "no store is known" in report.findings[-1].what
    assert {path.name for path, data in everything(directory).items() if before.get(path) != data} <= {"lock"}


def test_a_catalog_of_another_store_is_not_replaced(directory: Path) -> None:
    catalog = LmdbCatalog(directory / "other", store_uuid=b"o" * 16)
    catalog.load()
    catalog.apply(Change(put_volumes=(VolumeRow(0, b"w" * 16, SIZE_BYTES, 0),)))
    catalog.close()
    shutil.rmtree(directory / "catalog")
    (directory / "other").rename(directory / "catalog")
    report = rebuild(directory, volumes(directory))
    assert not report.is_rebuilt
    assert "the catalog that is there is of store 6f6f" in report.findings[-1].what
    assert read_catalog(directory / "catalog").store_uuid == b"o" * 16


def test_a_blank_catalog_counts_as_none_and_is_kept_aside_by_a_rebuild(directory: Path) -> None:
    """As left by a start on volumes of a lost catalog, which it refused."""
    shutil.rmtree(directory / "catalog")
    LmdbCatalog(directory / "catalog", store_uuid=b"o" * 16).close()
    report = check(directory, volumes(directory))
    assert report.contents is None
    assert [one.what for one in report.findings] == [
        f"catalog {directory / 'catalog'}: it is blank, and knows no volume and no namespace"
    ]
    report = rebuild(directory, volumes(directory))
    assert report.is_rebuilt
    assert report.old_catalog is not None
    assert read_catalog(report.old_catalog).store_uuid == b"o" * 16
    assert read_catalog(directory / "catalog").store_uuid == STORE
    assert check(directory, volumes(directory)).findings == []


@pytest.mark.parametrize("copy", [0, 1])
def test_a_rebuild_writes_a_superblock_copy_again_and_a_check_finds_nothing_then(directory: Path, copy: int) -> None:
    with volume_file(directory / "volume", 0).open("r+b") as file:
        file.seek(SUPERBLOCK_AT[copy] + 40)
        file.write(b"rot")
    assert [one.offset for one in check(directory, volumes(directory)).findings] == [SUPERBLOCK_AT[copy]]
    assert rebuild(directory, volumes(directory)).restored_superblocks == [(0, copy)]
    assert check(directory, volumes(directory)).findings == []


def test_a_volume_that_may_not_be_looked_at_counts_for_nothing_and_is_refused_by_name(directory: Path) -> None:
    """A name that the system refuses stands for every refusal, also to a user who may open everything."""
    refused = str(directory / ("n" * 300))
    assert total_bytes([*volumes(directory), refused]) == SIZE_BYTES
    assert total_bytes([str(directory / "none")]) == 0
    for run_it in (check, rebuild):
        with pytest.raises(VolumeError, match=r"volume 1 .* cannot be opened: File name too long"):
            run_it(directory, [*volumes(directory), refused])
        with pytest.raises(ConfigError, match="--dir"):
            run_it(Path(refused), volumes(directory))


def test_a_volume_that_is_given_twice_is_refused_with_both_places(directory: Path) -> None:
    shutil.copytree(directory / "volume", directory / "copy")
    for run_it in (check, rebuild):
        with pytest.raises(VolumeError, match=r"volume 0 \(.*/copy/.*\) and volume 0 \(.*/volume/.*\) are one volume"):
            run_it(directory, [*volumes(directory), str(directory / "copy")])


def test_nothing_is_rebuilt_without_a_volume_that_the_catalog_names(directory: Path) -> None:
    catalog = LmdbCatalog(directory / "catalog")
    catalog.load()
    catalog.apply(Change(put_volumes=(VolumeRow(1, b"w" * 16, SIZE_BYTES, 0),)))
    catalog.close()
    report = rebuild(directory, volumes(directory))
    assert not report.is_rebuilt
    assert f"the catalog names volume 1 ({(b'w' * 16).hex()}): give its path as --volume" in report.findings[-1].what


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


def test_without_any_note_records_are_still_checked_by_what_the_catalog_says_they_are() -> None:
    async def scenario() -> None:
        machine = Machine(seed=3)
        await eventful(machine)
        await machine.crash()
        contents = machine.catalog.load()
        (disk,) = disks_of(machine.volumes).values()
        superblock = survey_of(machine).superblocks[0]
        start = superblock.note_at(0, 0)
        disk.write(start, bytes(superblock.extents_at - start))
        machine.disks[0].corrupt(contents.namespaces["eval"].rows[0, 1][0].located.extent.offset_bytes + 4096)
        found = examine(survey([disk], layouts=layouts_of(contents)), contents)
        of_records = [one for one in found.findings if one.key is not None]
        assert [(one.namespace, one.key, one.what.split(",")[0]) for one in of_records] == [("eval", (0, 1), "chunk 0")]
        assert {one.what.split()[0] for one in found.findings if one.key is None} == {"copy"}, "of the notes alone"
        assert set(layouts_of(contents)) == {"moe", "eval"}

    run(scenario())


def test_a_description_in_the_catalog_that_cannot_be_read_describes_nothing() -> None:
    row = NamespaceRow("moe", {"kind": "none"}, (0,), 1, epoch=1, sequence=0)
    assert layouts_of(Contents(STORE, {"moe": NamespaceContents(row)})) == {}
    assert layouts_of(None) == {}


def test_a_namespace_of_which_nothing_comes_back_is_named_as_such() -> None:
    async def scenario() -> None:
        machine = Machine(seed=3, volume_count=2)
        await eventful(machine)
        await machine.crash()
        report = examine(survey(list(disks_of(machine.volumes).values())[:1]), None, "it is gone")
        assert report.proofs["moe"].steps == {}
        (said,) = [one.what for one in report.lost if (one.namespace, one.step) == ("moe", None)]
        assert "after a rebuild it has no commit" in said

    run(scenario())


def test_what_only_the_catalog_knows_of_a_step_outlives_a_rebuild_where_it_can_be_read() -> None:
    async def scenario() -> None:
        machine = Machine(seed=3)
        store = machine.start()
        view = await create(store)
        for step in (1, 2):
            await commit(store, view, step, keys_of(view))
        await store.admission.snapshot(view, 2)
        await train(store, view)
        await store.committer.prepare(view, 3, b"")
        await machine.crash()
        contents = machine.catalog.load()
        report = examine(survey_of(machine), contents)
        for known, expected in ((contents, [(2, True, False), (3, False, True)]), (None, [(2, True, False), (3, False, False)])):
            rows = [row for _, row in new_contents(report.found, report.proofs, known).put_steps]
            assert [(row.step, row.is_snapshot, row.is_prepared) for row in rows] == expected

    run(scenario())


class PowerCut(Exception):
    pass


@pytest.mark.parametrize("died_at", range(8))
def test_a_rebuild_that_the_power_ends_at_any_write_leaves_every_step_provable(died_at: int) -> None:
    """Both volumes lack copies of notes; the rebuild dies at its `died_at`-th write or flush, some of its writes are lost."""

    async def scenario() -> None:
        machine = Machine(seed=died_at, volume_count=2)
        await eventful(machine)
        await machine.crash()
        before = examine(survey_of(machine), None)
        for name, step, volume in (("moe", 9, 0), ("moe", 7, 1), ("eval", 3, 1)):
            note = before.proofs[name].steps[step].found
            for copy in (0, 1):
                machine.disks[volume].corrupt(before.found.superblocks[volume].note_at(note.slot, copy) + 100)
        report = examine(survey_of(machine), None)
        acts = count()

        class DyingDisk(MemoryDisk):
            def write(self, offset_bytes: int, data: bytes) -> None:
                if next(acts) == died_at:
                    raise PowerCut
                super().write(offset_bytes, data)

            def flush(self) -> None:
                if next(acts) == died_at:
                    raise PowerCut
                super().flush()

        with pytest.raises(PowerCut):  # six writes, and a flush of each volume
            restore_notes(report.found, report.proofs, {index: DyingDisk(disk) for index, disk in machine.volumes.items()})
        for disk in machine.disks.values():
            disk.crash(keep_random(died_at))
        again = examine(survey_of(machine), None)
        for name, proof in before.proofs.items():
            assert {step: one.state for step, one in again.proofs[name].steps.items()} == {
                step: one.state for step, one in proof.steps.items()
            }

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
        assert [(one.namespace, one.step) for one in lost] == [("eval", 3)]

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
