import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramstore.errors import VolumeError
from paramstore.storage.volume.backing_file import BackingFile, volume_path
from paramstore.storage.volume.file_volume import LARGE_READ_BYTES, FileVolume
from paramstore.testing.volume_contract import VolumeContract
from paramstore.testing.volumes import page_aligned
from paramstore.turns import Turns

SIZE_BYTES = 8 << 20


@pytest.fixture
def refusing_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT, as far as the flag goes."""
    set_direct = BackingFile.set_direct

    def refuse(file: BackingFile, is_direct: bool) -> None:
        if is_direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        set_direct(file, is_direct)

    monkeypatch.setattr(BackingFile, "set_direct", refuse)


@pytest.fixture
def lying_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that takes the flag and then fails every transfer made under it."""
    preadv, pwritev = os.preadv, os.pwritev

    def check(descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")

    def checked_preadv(descriptor: int, into: list[memoryview], at: int) -> int:
        check(descriptor)
        return preadv(descriptor, into, at)

    def checked_pwritev(descriptor: int, data: list[memoryview], at: int) -> int:
        check(descriptor)
        return pwritev(descriptor, data, at)

    monkeypatch.setattr(os, "preadv", checked_preadv)
    monkeypatch.setattr(os, "pwritev", checked_pwritev)


class TestDirectFileVolume(VolumeContract):
    @pytest.fixture
    def volume(self, tmp_path: Path) -> Iterator[FileVolume]:
        volume = FileVolume.create(tmp_path, index=4, size_bytes=SIZE_BYTES)
        if volume.describe()["mode"] != "direct":
            pytest.skip(f"no O_DIRECT under {tmp_path}: {volume.describe()['reason']}")
        yield volume
        volume.close()


class TestBufferedFileVolume(VolumeContract):
    @pytest.fixture
    def volume(self, tmp_path: Path, refusing_file_system: None) -> Iterator[FileVolume]:
        volume = FileVolume.create(tmp_path, index=4, size_bytes=SIZE_BYTES)
        assert volume.describe()["mode"] == "buffered"
        yield volume
        volume.close()


def test_a_closed_volume_opens_with_its_bytes(tmp_path: Path) -> None:
    data, found = page_aligned(8192, seed=1), page_aligned(8192)
    volume = FileVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES)
    volume.write(4096, [data])
    volume.flush()
    volume.close()
    again = FileVolume.open(tmp_path, index=0)
    again.read(4096, [found])
    again.close()
    assert again.size_bytes == SIZE_BYTES
    assert found == data


def test_the_probe_of_a_new_volume_leaves_zeros(tmp_path: Path) -> None:
    FileVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES).close()
    assert volume_path(tmp_path, 0).read_bytes() == bytes(SIZE_BYTES)


def test_the_probe_of_an_existing_volume_writes_nothing(tmp_path: Path) -> None:
    FileVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES).close()
    before = b"\1" * SIZE_BYTES
    volume_path(tmp_path, 0).write_bytes(before)
    FileVolume.open(tmp_path, index=0).close()
    assert volume_path(tmp_path, 0).read_bytes() == before


@pytest.mark.usefixtures("refusing_file_system")
def test_a_fallback_says_so_once_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    volume = FileVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES)
    volume.write(0, [page_aligned(4096)])
    volume.close()
    assert volume.describe()["reason"] == "setting O_DIRECT failed: Invalid argument"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        f"volume 0 ({volume_path(tmp_path, 0)}) goes through the page cache: setting O_DIRECT failed: Invalid argument"
    ]


@pytest.mark.usefixtures("lying_file_system")
def test_a_file_system_that_takes_the_flag_and_fails_is_found_out(tmp_path: Path) -> None:
    created = FileVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES)
    created.close()
    opened = FileVolume.open(tmp_path, index=0)
    opened.close()
    for volume in (created, opened):
        assert volume.describe()["mode"] == "buffered"
        assert "a page did not go through with O_DIRECT" in str(volume.describe()["reason"])
    assert volume_path(tmp_path, 0).read_bytes() == bytes(SIZE_BYTES)


@pytest.mark.parametrize(
    ("alignment_bytes", "reason"),
    [
        (0, "the file system has no direct I/O for this file"),
        (65536, "direct I/O must be aligned to 65536 bytes here, extents are to 4096"),
    ],
)
def test_a_file_system_that_says_no_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alignment_bytes: int, reason: str
) -> None:
    monkeypatch.setattr("paramstore.storage.volume.file_volume.direct_io_alignment", lambda descriptor: alignment_bytes)
    volume = FileVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES)
    volume.close()
    assert (volume.describe()["mode"], volume.describe()["reason"]) == ("buffered", reason)


def test_a_file_system_that_does_not_say_is_tried_and_doubted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramstore.storage.volume.file_volume.direct_io_alignment", lambda descriptor: None)
    volume = FileVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES)
    volume.close()
    if volume.describe()["mode"] == "direct":
        assert "does not tell" in str(volume.describe()["reason"])


@pytest.mark.usefixtures("refusing_file_system")
def test_a_refused_fallback_leaves_no_new_file_and_keeps_an_old_one(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match=r"O_DIRECT is refused: .*; set allow_buffered"):
        FileVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES, allow_buffered=False)
    assert list(tmp_path.iterdir()) == []
    FileVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES).close()
    with pytest.raises(VolumeError, match="O_DIRECT is refused"):
        FileVolume.open(tmp_path, index=0, allow_buffered=False)
    assert volume_path(tmp_path, 0).stat().st_size == SIZE_BYTES


def test_a_truncated_volume_is_an_error_and_stays_usable(tmp_path: Path) -> None:
    volume = FileVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES)
    os.truncate(volume_path(tmp_path, 0), 4096)
    with pytest.raises(VolumeError, match=f"truncated to 4096 bytes, expected {SIZE_BYTES}"):
        volume.read(0, [page_aligned(8192)])
    volume.read(0, [page_aligned(4096)])
    volume.close()


def test_description_names_path_and_tier(tmp_path: Path) -> None:
    volume = FileVolume.create(tmp_path, index=5, size_bytes=SIZE_BYTES)
    volume.close()
    described = volume.describe()
    assert described["path"] == str(tmp_path / "volume-005.data")
    assert described["tier"] == "nvme"
    assert set(described) == {"index", "tier", "path", "mode", "reason", "size_bytes"}


@pytest.mark.parametrize(("mode", "expected"), [("direct", 2), ("buffered", 0)])
def test_large_direct_reads_take_turns_and_end_them_when_they_fail(tmp_path: Path, mode: str, expected: int) -> None:
    taken = list[str]()

    class Noted(Turns):
        def __enter__(self) -> None:
            super().__enter__()
            taken.append("turn")

    file = BackingFile.create(tmp_path, index=0, size_bytes=2 * LARGE_READ_BYTES)
    volume = FileVolume(file, index=0, mode=mode, reason="", large_reads=Noted(1))
    large, small = page_aligned(LARGE_READ_BYTES), page_aligned(4096)
    volume.read(0, [small])
    volume.read(0, [small, page_aligned(LARGE_READ_BYTES - 8192)])
    with pytest.raises(VolumeError):
        volume.read(4 * LARGE_READ_BYTES, [large])
    volume.read(0, [page_aligned(4096), page_aligned(LARGE_READ_BYTES - 4096)])
    assert len(taken) == expected
    volume.close()
