"""Segments: sealed, aligned, huge where the machine allows, gone when the last view is."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from paramstore.errors import CapacityError
from paramstore.memory import arena, pages
from paramstore.memory.arena import (
    PageKind,
    PageReport,
    Segment,
    allocate_private,
    allocate_shared,
    allocate_upload,
    probe_pages,
)
from paramstore.memory.pages import SEGMENT_ALIGNMENT_BYTES

LENGTH_BYTES = 2 * SEGMENT_ALIGNMENT_BYTES
SMALL = PageReport(PageKind.SMALL, PageKind.SMALL, "")
TRANSPARENT = PageReport(PageKind.TRANSPARENT, PageKind.TRANSPARENT, "")
Allocate = Callable[[int, PageReport], Segment]


@pytest.fixture(params=[allocate_shared, allocate_private, allocate_upload], ids=["shared", "private", "upload"])
def segment(request: pytest.FixtureRequest) -> Iterator[Segment]:
    allocate: Allocate = request.param
    made = allocate(LENGTH_BYTES, SMALL)
    yield made
    made.close()


def maps_lines(address: int) -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line for line in maps if line.startswith(f"{address:x}-")]


def test_a_view_writes_through_without_a_copy(segment: Segment) -> None:
    segment.view(4096, 4)[:] = b"abcd"
    assert bytes(segment.view(4095, 6)) == b"\0abcd\0"
    assert not segment.view(0, LENGTH_BYTES).readonly


def test_a_view_beyond_the_segment_is_refused(segment: Segment) -> None:
    with pytest.raises(AssertionError):
        segment.view(LENGTH_BYTES - 4096, 4097)


def test_a_segment_lies_at_an_aligned_address(segment: Segment) -> None:
    assert segment._mapping.address % SEGMENT_ALIGNMENT_BYTES == 0


def test_touching_makes_every_byte_resident_and_changes_none(segment: Segment) -> None:
    segment.view(8192, 2)[:] = b"xy"
    assert segment.resident_bytes() < LENGTH_BYTES
    segment.touch()
    assert segment.resident_bytes() == LENGTH_BYTES
    assert bytes(segment.view(8192, 3)) == b"xy\0"


def test_old_kernels_populate_by_rewriting_a_byte_of_each_page(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MADV_POPULATE_WRITE", 9999)
    segment.view(8192, 2)[:] = b"xy"
    segment.touch()
    assert segment.resident_bytes() == LENGTH_BYTES
    assert bytes(segment.view(8192, 3)) == b"xy\0"


def test_memory_is_unmapped_when_closed_and_the_last_view_is_gone(segment: Segment) -> None:
    view, address = segment.view(4096, 4096), segment._mapping.address
    segment.close()
    view[:4] = b"abcd"
    assert maps_lines(address)
    del view
    assert not maps_lines(address)


def test_closing_twice_closes_no_foreign_fd(segment: Segment) -> None:
    segment.close()
    fd = os.memfd_create("stranger")
    segment.close()
    os.close(fd)


def test_segments_stay_out_of_core_dumps(segment: Segment) -> None:
    assert "dd" in vm_flags(segment._mapping.address)


def test_private_segments_are_not_inherited() -> None:
    segment = allocate_private(LENGTH_BYTES, SMALL)
    assert segment.fd is None
    assert "dc" in vm_flags(segment._mapping.address)
    segment.close()


def vm_flags(address: int) -> list[str]:
    is_here = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if pages.MAPPING_LINE.match(line):
                first, last = line.split()[0].split("-")
                is_here = int(first, 16) <= address < int(last, 16)
            elif is_here and line.startswith("VmFlags:"):
                return line.split()[1:]
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("page_report", [SMALL, TRANSPARENT], ids=["small", "transparent"])
def test_nobody_can_write_shrink_grow_or_reseal_a_shared_segment(page_report: PageReport) -> None:
    segment = allocate_shared(LENGTH_BYTES, page_report)
    fd = segment.fd
    assert fd is not None
    with pytest.raises(PermissionError):
        mmap.mmap(fd, LENGTH_BYTES)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    for length_bytes in (0, 2 * LENGTH_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, length_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with pytest.raises(PermissionError):
        mmap.mmap(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), LENGTH_BYTES)
    segment.touch()
    segment.view(0, 1)[0] = 7
    assert mmap.mmap(fd, LENGTH_BYTES, prot=mmap.PROT_READ)[0] == 7
    segment.close()


def test_an_upload_area_is_writable_by_its_client_but_keeps_its_size() -> None:
    segment = allocate_upload(LENGTH_BYTES, SMALL)
    assert segment.fd is not None
    mmap.mmap(segment.fd, LENGTH_BYTES)[:1] = b"\x07"
    assert segment.view(0, 1)[0] == 7
    for length_bytes in (0, 2 * LENGTH_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, length_bytes)
    segment.close()


def test_an_upload_area_takes_no_memory_before_it_is_used() -> None:
    segment = allocate_upload(1 << 40, TRANSPARENT)
    assert segment.resident_bytes() == 0
    segment.close()


def test_an_upload_area_takes_nothing_of_the_pool_of_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client could punch holes that an empty pool cannot fill again: the daemon's next look would be a bus error."""
    asked: list[int] = []
    create = os.memfd_create

    def memfd_create(name: str, flags: int) -> int:
        asked.append(flags)
        return create(name, flags & ~os.MFD_HUGETLB & ~os.MFD_HUGE_2MB)

    monkeypatch.setattr(arena.os, "memfd_create", memfd_create)
    segment = allocate_upload(LENGTH_BYTES, PageReport(PageKind.HUGETLB, PageKind.HUGETLB, ""))
    segment.close()
    assert asked
    assert not any(flags & os.MFD_HUGETLB for flags in asked)


def test_fds_are_not_inherited_by_programs() -> None:
    segment = allocate_shared(LENGTH_BYTES, SMALL)
    assert segment.fd is not None
    assert not os.get_inheritable(segment.fd)
    segment.close()


def test_memory_that_cannot_be_had_names_size_and_limits() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for allocate in (allocate_private, allocate_shared):
        with pytest.raises(CapacityError, match=f"{1 << 47} bytes.*MemAvailable.*overcommit_memory"):
            allocate(1 << 47, SMALL)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_probe_tells_what_segments_are_really_made_of() -> None:
    report = probe_pages()
    for allocate, kind in ((allocate_shared, report.shared), (allocate_private, report.private)):
        segment = allocate(LENGTH_BYTES, report)
        segment.touch()
        if kind is PageKind.TRANSPARENT:
            assert segment.huge_bytes() == LENGTH_BYTES
        segment.close()
    assert (report.advice == "") == (PageKind.SMALL not in (report.shared, report.private))


def test_the_probe_changes_no_setting() -> None:
    def settings() -> list[str]:
        names = [arena.TRANSPARENT_SETTINGS / "enabled", arena.TRANSPARENT_SETTINGS / "shmem_enabled"]
        return [name.read_text() for name in names if name.exists()]

    before = settings()
    probe_pages()
    assert settings() == before


def refuse_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def madvise(address: int, length_bytes: int, advice: int) -> int:
        if advice == pages.MADV_COLLAPSE:
            return errno.EAGAIN
        return real(address, length_bytes, mmap.MADV_NOHUGEPAGE if advice == mmap.MADV_HUGEPAGE else advice)

    real = pages._madvise
    monkeypatch.setattr(pages, "_madvise", madvise)


@pytest.mark.skipif(probe_pages().shared is PageKind.HUGETLB, reason="the pool of huge pages has room here")
def test_without_huge_pages_the_probe_says_so_and_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_huge_pages(monkeypatch)
    report = probe_pages()
    assert report.shared is PageKind.SMALL
    assert report.private is PageKind.SMALL
    assert "shmem_enabled" in report.advice
    assert "echo madvise" in report.advice


def test_a_segment_that_misses_its_huge_pages_says_so_and_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_huge_pages(monkeypatch)
    segment = allocate_shared(LENGTH_BYTES, TRANSPARENT)
    with caplog.at_level(logging.WARNING):
        segment.touch()
    assert f"{LENGTH_BYTES} of {LENGTH_BYTES} bytes" in caplog.text
    assert segment.resident_bytes() == LENGTH_BYTES
    segment.close()


@pytest.mark.parametrize("allocate", [allocate_shared, allocate_private])
def test_an_empty_pool_of_huge_pages_falls_back(allocate: Allocate, caplog: pytest.LogCaptureFixture) -> None:
    report = PageReport(PageKind.HUGETLB, PageKind.HUGETLB, "")
    with caplog.at_level(logging.WARNING):
        segment = allocate(1 << 32, report)
    assert segment.page_kind is not PageKind.HUGETLB
    assert "the pool of huge pages has no room" in caplog.text
    segment.close()


def test_the_module_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, paramstore.memory.shared; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_segment_that_is_closed_while_it_is_counted_has_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = PageReport(PageKind.SMALL, PageKind.SMALL, "")
    shared, private = allocate_shared(SEGMENT_ALIGNMENT_BYTES, pages), allocate_private(SEGMENT_ALIGNMENT_BYTES, pages)
    for segment in (shared, private):
        segment.touch()
        assert segment.resident_bytes() == SEGMENT_ALIGNMENT_BYTES
    fd = shared.fd
    for segment in (shared, private):
        segment.close()
        assert segment.resident_bytes() == 0
    shared.fd = fd  # as a worker saw it just before
    assert shared.resident_bytes() == 0
    shared.fd = None
