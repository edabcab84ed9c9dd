import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramstore.errors import VolumeError
from paramstore_native import libpmem2

needs_library = pytest.mark.skipif(bool(libpmem2.missing_reason()), reason=libpmem2.missing_reason())
SIZE_BYTES = 1 << 20


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, SIZE_BYTES)
    yield descriptor
    os.close(descriptor)


def test_a_missing_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libpmem2, "SONAME", "libpmem2.so.99")
    libpmem2.load.cache_clear()
    reason = libpmem2.missing_reason()
    assert "libpmem2.so.99 cannot be loaded" in reason
    assert "apt install libpmem2" in reason
    with pytest.raises(VolumeError, match="apt install libpmem2"):
        libpmem2.load()


@pytest.mark.pmem
@needs_library
def test_written_buffers_lie_one_after_the_other_in_the_file(descriptor: int) -> None:
    mapping = libpmem2.Mapping(descriptor, size_bytes=SIZE_BYTES, granularity="page")
    mapping.write(8192, [memoryview(b"a" * 4096), memoryview(b""), memoryview(bytearray(b"b" * 100))])
    assert os.pread(descriptor, 4296, 8192) == b"a" * 4096 + b"b" * 100 + bytes(100)


@pytest.mark.pmem
@needs_library
def test_an_ordinary_file_has_page_granularity_and_nothing_finer(descriptor: int) -> None:
    mapping = libpmem2.Mapping(descriptor, size_bytes=SIZE_BYTES, granularity="page")
    if mapping.persists_writes:
        pytest.skip(f"the file lies on persistent memory, or {libpmem2.FORCE_VARIABLE} is set: {mapping.granularity}")
    assert mapping.granularity == "page"
    for granularity in ("cache_line", "byte"):
        with pytest.raises(VolumeError, match="libpmem2: requested granularity not available"):
            libpmem2.Mapping(descriptor, size_bytes=SIZE_BYTES, granularity=granularity)


@pytest.mark.pmem
@needs_library
def test_a_mapping_outlives_its_descriptor_and_goes_with_its_last_reference(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, SIZE_BYTES)
    mapping = libpmem2.Mapping(descriptor, size_bytes=SIZE_BYTES, granularity="page")
    os.close(descriptor)
    mapping.write(0, [memoryview(b"late")])
    assert path.read_bytes()[:4] == b"late"
    assert str(path) in Path("/proc/self/maps").read_text()
    del mapping
    assert str(path) not in Path("/proc/self/maps").read_text()


@pytest.mark.pmem
@needs_library
def test_a_file_that_cannot_be_mapped_is_an_error(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(VolumeError, match=r"libpmem2: .* \(code -?\d+\)"):
        libpmem2.Mapping(descriptor, size_bytes=SIZE_BYTES, granularity="page")
    os.close(descriptor)


@pytest.mark.pmem
@needs_library
def test_a_write_beyond_the_mapping_is_a_bug(descriptor: int) -> None:
    mapping = libpmem2.Mapping(descriptor, size_bytes=SIZE_BYTES, granularity="page")
    with pytest.raises(AssertionError), mmap.mmap(-1, 4096) as page, memoryview(page) as view:
        mapping.write(SIZE_BYTES - 2048, [view])
