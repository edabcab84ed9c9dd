"""A volume's file is read exactly, and never changed by whoever only looks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paramstore.errors import VolumeError
from paramstore.fsck.disks import FileDisk, volume_file, volume_index
from paramstore.storage.volume.backing_file import volume_path

BYTES = os.urandom(5 * 4096)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    volume_file(tmp_path, 3).write_bytes(BYTES)
    return tmp_path


def test_the_file_is_the_one_that_the_daemon_makes(tmp_path: Path) -> None:
    assert [volume_file(tmp_path, index) for index in (0, 41, 1000)] == [volume_path(tmp_path, index) for index in (0, 41, 1000)]


def test_bytes_are_read_where_they_lie(directory: Path) -> None:
    disk = FileDisk(directory, 3)
    assert (disk.index, disk.size_bytes) == (3, len(BYTES))
    assert disk.read(4096, 8192) == BYTES[4096 : 3 * 4096]
    disk.close()


def test_a_read_beyond_the_end_is_an_error_that_names_the_file(directory: Path) -> None:
    disk = FileDisk(directory, 3)
    with pytest.raises(VolumeError, match=r"volume 3 \(.*volume-003.data\): ends before 8192 bytes at offset 16384"):
        disk.read(16384, 8192)
    disk.close()


def test_a_disk_opened_for_reading_cannot_be_written(directory: Path) -> None:
    disk = FileDisk(directory, 3)
    with pytest.raises(VolumeError, match="writing at offset 0"):
        disk.write(0, bytes(4096))
    disk.close()
    assert volume_file(directory, 3).read_bytes() == BYTES


def test_a_writable_disk_writes_in_place(directory: Path) -> None:
    disk = FileDisk(directory, 3, is_writable=True)
    disk.write(4096, b"x" * 4096)
    disk.flush()
    disk.close()
    assert volume_file(directory, 3).read_bytes() == BYTES[:4096] + b"x" * 4096 + BYTES[8192:]


def test_a_volume_is_known_by_its_file_s_name_and_by_its_position_where_that_does_not_tell(directory: Path) -> None:
    assert volume_index(directory, 0) == 3
    volume_file(directory, 5).touch()
    assert volume_index(directory, 0) == 0, "there are two"
    (directory / "below").mkdir()
    assert volume_index(directory / "below", 2) == 2
    (directory / "below" / "volume-odd.data").touch()
    assert volume_index(directory / "below", 2) == 2
    assert volume_index(directory / ("n" * 300), 2) == 2


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_a_volume_that_another_writes_is_refused_whatever_directory_it_was_given_with(
    directory: Path, first: bool, second: bool
) -> None:
    holder = FileDisk(directory, 3, is_writable=first)
    with pytest.raises(VolumeError, match=r"volume 3 \(.*\) is in use by another process"):
        FileDisk(directory, 3, is_writable=second)
    holder.close()
    FileDisk(directory, 3, is_writable=second).close()


def test_two_may_look_at_a_volume_at_once(directory: Path) -> None:
    disks = [FileDisk(directory, 3), FileDisk(directory, 3)]
    assert [disk.read(0, 4096) for disk in disks] == [BYTES[:4096]] * 2
    for disk in disks:
        disk.close()


def test_missing_files_links_and_pipes_are_refused(tmp_path: Path, directory: Path) -> None:
    volume_file(tmp_path, 0).symlink_to(volume_file(directory, 3))
    os.mkfifo(volume_file(tmp_path, 1))
    for index in range(3):
        with pytest.raises(VolumeError, match=f"volume {index} "):
            FileDisk(tmp_path, index)
