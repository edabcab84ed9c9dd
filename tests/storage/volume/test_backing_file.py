import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramstore.errors import VolumeError
from paramstore.storage.volume import backing_file
from paramstore.storage.volume.backing_file import BackingFile, volume_path
from paramstore.testing.volumes import page_aligned

SIZE_BYTES = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[BackingFile]:
    file = BackingFile.create(tmp_path, index=3, size_bytes=SIZE_BYTES)
    yield file
    file.close()


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    """No file of this process may grow beyond it: a failing allocation without a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * SIZE_BYTES, hard))
    yield 2 * SIZE_BYTES
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_new_file_is_allocated_private_and_of_whole_pages(tmp_path: Path) -> None:
    file = BackingFile.create(tmp_path / "volume", index=12, size_bytes=SIZE_BYTES + 1)
    status = os.stat(volume_path(tmp_path / "volume", 12))
    file.close()
    assert file.size_bytes == status.st_size == SIZE_BYTES + 4096
    assert status.st_blocks * 512 >= status.st_size
    assert status.st_mode & 0o777 == 0o600
    assert os.stat(tmp_path / "volume").st_mode & 0o777 == 0o700


def test_an_existing_file_is_never_taken_for_a_new_one(tmp_path: Path) -> None:
    path = volume_path(tmp_path, 0)
    path.write_bytes(b"precious")
    with pytest.raises(VolumeError, match=f"volume 0: cannot create {path}: File exists"):
        BackingFile.create(tmp_path, index=0, size_bytes=SIZE_BYTES)
    assert path.read_bytes() == b"precious"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match=f"volume 0: cannot open {volume_path(tmp_path, 0)}: No such file"):
        BackingFile.open(tmp_path, index=0)


def test_a_symbolic_link_is_refused(tmp_path: Path, file: BackingFile) -> None:
    volume_path(tmp_path, 0).symlink_to(file.path)
    with pytest.raises(VolumeError, match=r"cannot open .*: it is a symbolic link"):
        BackingFile.open(tmp_path, index=0)
    with pytest.raises(VolumeError, match="cannot create"):
        BackingFile.create(tmp_path, index=0, size_bytes=SIZE_BYTES)


def test_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(volume_path(tmp_path, 0))
    with pytest.raises(VolumeError, match="is not a regular file"):
        BackingFile.open(tmp_path, index=0)


def test_an_empty_file_is_no_volume(tmp_path: Path) -> None:
    volume_path(tmp_path, 0).touch()
    with pytest.raises(VolumeError, match="holds 0 bytes: not a volume"):
        BackingFile.open(tmp_path, index=0)


def test_opened_file_has_the_bytes_and_size_it_was_left_with(tmp_path: Path) -> None:
    file = BackingFile.create(tmp_path, index=3, size_bytes=SIZE_BYTES)
    data, found = page_aligned(8192, seed=1), page_aligned(8192)
    file.write(4096, [data])
    file.close()
    again = BackingFile.open(tmp_path, index=3)
    again.read(4096, [found])
    again.close()
    assert again.size_bytes == SIZE_BYTES
    assert found == data


def test_an_open_file_is_refused_to_others_and_free_when_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = BackingFile.create(tmp_path, index=3, size_bytes=SIZE_BYTES)
    monkeypatch.setattr(backing_file, "LOCK_PAUSE_S", 0.0)
    with pytest.raises(VolumeError, match=r"volume 3 .* is in use by another process: stop that daemon or fsck first"):
        BackingFile.open(tmp_path, index=3)
    file.close()
    BackingFile.open(tmp_path, index=3).close()


def test_whoever_closes_the_file_in_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = BackingFile.create(tmp_path, index=3, size_bytes=SIZE_BYTES)

    class Pause(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            file.close()
            return True

    monkeypatch.setattr(threading, "Event", Pause)
    BackingFile.open(tmp_path, index=3).close()


@pytest.mark.parametrize("left_bytes", [0, 4096, 6000])
def test_a_truncated_file_names_offset_expected_and_found(file: BackingFile, left_bytes: int) -> None:
    os.truncate(file.path, left_bytes)
    with pytest.raises(
        VolumeError,
        match=f"volume 3 .*: cannot transfer 8192 bytes at offset 4096: the file was truncated to {left_bytes} bytes, "
        f"expected {SIZE_BYTES}",
    ):
        file.read(4096, [page_aligned(8192)])


def test_a_growth_without_space_names_the_missing_bytes_and_allocates_nothing(file: BackingFile) -> None:
    before = os.stat(file.path)
    status = os.statvfs(file.path)
    wanted_bytes = SIZE_BYTES + status.f_bavail * status.f_frsize + (1 << 40)
    with pytest.raises(VolumeError, match=r"No space left on device; \d{13} bytes are missing, \d+ are free"):
        file.allocate(wanted_bytes)
    after = os.stat(file.path)
    assert (after.st_size, after.st_blocks) == (before.st_size, before.st_blocks)
    assert file.size_bytes == SIZE_BYTES


def test_a_growth_that_fails_half_way_leaves_the_size_as_before(file: BackingFile, file_size_limit: int) -> None:
    with pytest.raises(VolumeError, match=f"cannot grow from {SIZE_BYTES} to {file_size_limit + 4096} bytes: File too"):
        file.allocate(file_size_limit + 4096)
    assert file.size_bytes == os.stat(file.path).st_size == SIZE_BYTES
    file.allocate(file_size_limit)
    assert file.size_bytes == file_size_limit


def test_a_growth_that_does_not_become_durable_is_taken_back(file: BackingFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(VolumeError, match=f"cannot grow from {SIZE_BYTES} to {3 * SIZE_BYTES} bytes: Input/output error"):
        file.allocate(3 * SIZE_BYTES)
    status = os.stat(file.path)
    assert file.size_bytes == status.st_size == SIZE_BYTES
    assert status.st_blocks * 512 < 3 * SIZE_BYTES


def test_a_creation_that_fails_leaves_no_file(tmp_path: Path, file_size_limit: int) -> None:
    with pytest.raises(VolumeError):
        BackingFile.create(tmp_path, index=0, size_bytes=file_size_limit + 4096)
    assert list(tmp_path.iterdir()) == []


def test_short_transfers_are_continued(file: BackingFile, monkeypatch: pytest.MonkeyPatch) -> None:
    data = page_aligned(5 * 4096, seed=2)
    found = page_aligned(5 * 4096)
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:1000]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, data, at: pwritev(fd, [data[0][:1000]], at))
    file.write(8192, [data[:4096], data[4096:]])
    file.read(8192, [found[: 3 * 4096], found[3 * 4096 :]])
    assert found == data


def test_a_device_that_takes_nothing_is_an_error_and_no_endless_loop(
    file: BackingFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: 0)
    monkeypatch.setattr(os, "pwritev", lambda fd, data, at: 0)
    with pytest.raises(VolumeError, match="write of 4096 bytes at offset 0 failed: nothing was taken after 0 bytes"):
        file.write(0, [page_aligned(4096)])
    with pytest.raises(VolumeError, match="read of 4096 bytes at offset 0 failed: nothing came after 0 bytes"):
        file.read(0, [page_aligned(4096)])


def test_an_error_of_the_device_names_operation_offset_and_reason(file: BackingFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    for name in ("preadv", "pwritev", "fdatasync"):
        monkeypatch.setattr(os, name, fail)
    with pytest.raises(VolumeError, match=r"volume 3 \(.*\): read of 4096 bytes at offset 8192 failed: Input/output error"):
        file.read(8192, [page_aligned(4096)])
    with pytest.raises(VolumeError, match="write of 4096 bytes at offset 8192 failed: Input/output error"):
        file.write(8192, [page_aligned(4096)])
    with pytest.raises(VolumeError, match="flush failed: Input/output error"):
        file.sync()


def test_a_volume_in_place_of_or_below_a_file_is_refused_with_that_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(VolumeError, match=f"{directory} is no directory, or lies in a file"):
            BackingFile.create(directory, index=0, size_bytes=SIZE_BYTES)
