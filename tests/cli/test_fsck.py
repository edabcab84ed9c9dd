"""`paramstore fsck`: what it prints, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paramstore.cli.fsck import lines
from paramstore.fsck import swap
from paramstore.fsck.check import Report, examine
from paramstore.fsck.disks import volume_file
from paramstore.fsck.reader import NOTE_COPIES
from paramstore.storage.catalog.base import Contents
from paramstore.storage.format.notes import format_volume
from paramstore.storage.format.structures import Superblock
from paramstore.testing.volumes import MemoryVolume
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.memory_disk import eventful, survey_of
from paramstore_testkit.stores.small_store import run

Run = Callable[..., int]
SIZE_BYTES = 3 << 20


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A volume of a store that has no catalog."""
    volume = MemoryVolume(SIZE_BYTES)
    format_volume(volume, Superblock(b"s" * 16, b"v" * 16, 0, note_slots=2))
    buffer = bytearray(SIZE_BYTES)
    volume.read(0, [memoryview(buffer)])
    (tmp_path / "volume").mkdir()
    volume_file(tmp_path / "volume", 0).write_bytes(buffer)
    return tmp_path


def test_a_lost_catalog_is_corrupt_a_rebuilt_one_is_clean(
    directory: Path, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore("fsck", "--dir", str(directory)) == 4
    out, err = capsys.readouterr()
    assert "wrong: catalog" in out
    assert err == ""
    assert paramstore("fsck", "--dir", str(directory), "--rebuild") == 0
    assert "rebuilt: a new catalog with 0 steps of 0 namespaces\n" in capsys.readouterr().out
    assert paramstore("fsck", "--dir", str(directory)) == 0
    assert capsys.readouterr().out.endswith("clean: the catalog and the volumes agree, and every record of every step is whole\n")


def looked_at(harm: Callable[[Machine, Contents], None]) -> Report:
    """What fsck says of a store at steps 4, 7 and 9 of `moe` and 3 of `eval`, once its volumes or its catalog are harmed."""
    reports: list[Report] = []

    async def scenario() -> None:
        machine = Machine(seed=3)
        await eventful(machine)
        await machine.crash()
        contents = machine.catalog.load()
        harm(machine, contents)
        reports.append(examine(survey_of(machine), contents))

    run(scenario())
    return reports[0]


def test_where_the_catalog_has_other_steps_than_the_volumes_prove_both_are_told() -> None:
    def forget(machine: Machine, contents: Contents) -> None:
        del contents.namespaces["moe"].steps[9]

    said = list(lines(looked_at(forget)))
    assert "namespace moe: steps proven by the volumes: 4, 7, 9; in the catalog: 4, 7" in said
    assert "namespace eval: steps proven by the volumes: 3" in said


def spoil_the_newest_note(machine: Machine, contents: Contents) -> None:
    found = survey_of(machine)
    for at in (found.superblocks[0].note_at(contents.namespaces["moe"].steps[9].note_slot, copy) for copy in NOTE_COPIES):
        machine.disks[0].corrupt(at + 300)


def test_what_a_rebuild_would_lose_is_said_before_it_is_asked_for() -> None:
    said = list(lines(looked_at(spoil_the_newest_note)))
    warned = [line for line in said if line.startswith("with --rebuild")]
    assert [line.split(": ")[0] for line in warned] == ["with --rebuild step 9 of namespace moe would be lost"]
    assert sum("there is no whole note in slot" in line for line in said) == len(NOTE_COPIES)


def test_reasons_are_told_once_per_step() -> None:
    def harm(machine: Machine, contents: Contents) -> None:
        for key in ((0, 2), (0, 3)):
            machine.disks[0].corrupt(contents.namespaces["moe"].rows[key][-1].located.extent.offset_bytes + 4096)

    (line,) = (line for line in lines(looked_at(harm)) if line.startswith("with --rebuild"))
    assert line.startswith("with --rebuild step 9 of namespace moe would be lost: ")
    assert line.endswith("; and 1 more")


def test_nothing_would_be_lost_to_a_rebuild_that_would_be_refused_nor_without_a_catalog() -> None:
    report = looked_at(spoil_the_newest_note)
    report.refusal = "nothing was rebuilt"
    assert not any(line.startswith("with --rebuild") for line in lines(report))
    report = looked_at(spoil_the_newest_note)
    report.contents = None
    assert not any(line.startswith("with --rebuild") for line in lines(report))


def test_a_healthy_store_has_nothing_to_lose() -> None:
    said = list(lines(looked_at(lambda *_: None)))
    assert said[0].split(": ")[1].split(", ")[0] == "1 volume"
    assert not any(line.startswith("with --rebuild") for line in said)


def test_a_volume_that_may_not_be_looked_at_is_one_line(
    directory: Path, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore("fsck", "--dir", str(directory), "--volume", str(directory / ("n" * 300))) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "VolumeError: volume 0 " in err


def refuse_at(place: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that refuses one of the writes that a rebuild makes."""

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    if place == "lock":
        monkeypatch.setattr(os, "ftruncate", refuse)
    elif place == "volume":
        monkeypatch.setattr(os, "pwrite", refuse)
    elif place == "catalog":
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    else:
        monkeypatch.setattr(swap, "flush_directory", refuse)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("place", ["lock", "volume", "catalog", "directory"])
def test_a_rebuild_that_a_disk_refuses_has_failed_and_is_not_called_corruption(
    place: str, number: int, directory: Path, paramstore: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with volume_file(directory / "volume", 0).open("r+b") as file:
        file.write(b"rot")  # in a superblock, which a rebuild writes again
    with monkeypatch.context() as patch:
        refuse_at(place, number, patch)
        assert paramstore("fsck", "--dir", str(directory), "--rebuild") == 1
    assert os.strerror(number) in capsys.readouterr().err
    assert paramstore("fsck", "--dir", str(directory), "--rebuild") == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ENOENT])
def test_a_catalog_that_cannot_be_copied_for_want_of_room_is_not_called_damaged(
    number: int, directory: Path, paramstore: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ENOENT is what Python says where no temporary directory can be written."""

    def refuse(**named: object) -> None:
        raise OSError(number, os.strerror(number))

    assert paramstore("fsck", "--dir", str(directory), "--rebuild") == 0
    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    for words in ((), ("--rebuild",)):
        assert paramstore("fsck", "--dir", str(directory), *words) == 1
        assert "no room for a copy of it" in capsys.readouterr().err
    assert not (directory / "catalog.before-rebuild-1").exists()


def test_a_superblock_that_was_written_again_is_said(
    directory: Path, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with volume_file(directory / "volume", 0).open("r+b") as file:
        file.write(b"rot")
    assert paramstore("fsck", "--dir", str(directory), "--rebuild") == 0
    assert "restored: superblock copy 0 of volume 0\n" in capsys.readouterr().out
    assert paramstore("fsck", "--dir", str(directory), "--json") == 0
    assert json.loads(capsys.readouterr().out)["restored_superblocks"] == []


def test_what_a_rebuild_lost_is_said_once() -> None:
    def harm(machine: Machine, contents: Contents) -> None:
        row = contents.namespaces["moe"].rows[0, 3][-1]
        machine.disks[0].corrupt(row.located.extent.offset_bytes + 4096)

    report = looked_at(harm)
    report.contents, report.is_rebuilt = None, True
    report.findings = [*report.lost]
    said = [line for line in lines(report) if "chunk 0" in line]
    assert [line.split(":")[0] for line in said] == ["lost"]


def test_json_says_everything(directory: Path, paramstore: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert paramstore("fsck", "--dir", str(directory), "--json") == 4
    said = json.loads(capsys.readouterr().out)
    assert said["store"] == (b"s" * 16).hex()
    assert said["volumes"]["0"]["size_bytes"] == SIZE_BYTES
    assert (said["has_catalog"], said["is_rebuilt"], said["namespaces"], said["lost"]) == (False, False, {}, [])
    assert len(said["findings"]) == 1


def test_a_volume_that_is_not_there_is_a_failure(
    directory: Path, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "catalog").mkdir()
    assert paramstore("fsck", "--dir", str(directory), "--volume", str(directory / "none")) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "VolumeError: volume 0 " in err
    assert list(directory.glob("*/*")) == [volume_file(directory / "volume", 0)]


def test_a_directory_without_a_store_is_a_usage_error(
    tmp_path: Path, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ((), ("--rebuild",)):
        assert paramstore("fsck", "--dir", str(tmp_path), *words) == 2
        said = f"--dir {tmp_path}: there is no store: it has no catalog, and no volume is in {tmp_path}/volume"
        assert capsys.readouterr() == ("", f"paramstore: ConfigError: {said}\n")
        assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_a_usage_error(
    tmp_path: Path, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore("fsck", "--dir", str(tmp_path / "none")) == 2
    assert "no such directory" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_an_unknown_flag_is_a_usage_error(paramstore: Run) -> None:
    assert paramstore("fsck", "--repair") == 2


@pytest.mark.slow
def test_it_needs_no_torch_and_none_of_the_daemon(directory: Path, modules_of: Callable[..., set[str]]) -> None:
    modules = modules_of("fsck", "--dir", str(directory), code=4)
    assert "paramstore.fsck.check" in modules
    strangers = {
        "torch", "paramstore.storage.format.structures", "paramstore.storage.catalog.ledger", "paramstore.engine",
        "paramstore.daemon",
    }  # fmt: skip
    assert modules & strangers == set()
