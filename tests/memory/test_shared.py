"""A client's mapping: refused unless it is safe, read-only for real, alive as long as its tensors."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paramstore.errors import ProtocolError
from paramstore.memory.arena import PageKind, PageReport, Segment, allocate_shared, allocate_upload
from paramstore.memory.pages import SEGMENT_ALIGNMENT_BYTES
from paramstore.memory.shared import Mapping

LENGTH_BYTES = SEGMENT_ALIGNMENT_BYTES
PAGES = PageReport(PageKind.TRANSPARENT, PageKind.TRANSPARENT, "")


@pytest.fixture
def shared() -> Iterator[Segment]:
    segment = allocate_shared(LENGTH_BYTES, PAGES)
    yield segment
    segment.close()


@pytest.fixture
def upload() -> Iterator[Segment]:
    segment = allocate_upload(LENGTH_BYTES, PAGES)
    yield segment
    segment.close()


def received(segment: Segment) -> int:
    """The fd as a client gets it: its own."""
    assert segment.fd is not None
    return os.dup(segment.fd)


def mapped(fd: int, length_bytes: int, *, is_writable: bool) -> Mapping:
    """A mapping of the descriptor, which is closed."""
    try:
        return Mapping(fd, length_bytes, is_writable=is_writable)
    finally:
        os.close(fd)


def is_in_maps(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        return any(line.startswith(f"{address:x}-") for line in maps)


def test_a_tensor_sees_the_daemons_bytes_without_copy_or_warning(shared: Segment) -> None:
    mapping = mapped(received(shared), LENGTH_BYTES, is_writable=False)
    tensor = torch.frombuffer(mapping.buffer, dtype=torch.float32, offset=4096, count=4)
    shared.view(4096, 16).cast("f")[:] = memoryview(torch.arange(4.0).numpy())
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert tensor.data_ptr() == mapping.address + 4096
    assert mapping.address % SEGMENT_ALIGNMENT_BYTES == 0


def test_the_mapping_lives_exactly_as_long_as_its_last_tensor(shared: Segment) -> None:
    mapping = mapped(received(shared), LENGTH_BYTES, is_writable=False)
    address = mapping.address
    tensor = torch.frombuffer(mapping.buffer, dtype=torch.uint8)
    part = tensor[:10].view(torch.uint8)
    mapping.close()
    del tensor
    assert is_in_maps(address)
    assert mapping.is_mapped
    assert part.sum().item() == 0
    del part
    assert not is_in_maps(address)
    assert not mapping.is_mapped


def test_tensors_stay_readable_after_the_daemon_gave_the_segment_up(shared: Segment) -> None:
    mapping = mapped(received(shared), LENGTH_BYTES, is_writable=False)
    shared.view(0, 1)[0] = 9
    shared.close()
    assert memoryview(mapping.buffer).cast("B")[0] == 9  # type: ignore[arg-type]


def test_the_fd_stays_the_callers(shared: Segment) -> None:
    fd = received(shared)
    Mapping(fd, LENGTH_BYTES, is_writable=False).close()
    with pytest.raises(ProtocolError):
        Mapping(fd, 2 * LENGTH_BYTES, is_writable=False)
    os.close(fd)


def test_a_client_writes_into_its_upload_area(upload: Segment) -> None:
    mapping = mapped(received(upload), LENGTH_BYTES, is_writable=True)
    mapping.touch()
    assert upload.resident_bytes() == LENGTH_BYTES
    torch.frombuffer(mapping.buffer, dtype=torch.float32)[1] = 2.5
    assert upload.view(4, 4).cast("f")[0] == 2.5


def test_memory_that_others_may_still_write_is_refused_as_read_only(upload: Segment) -> None:
    with pytest.raises(ProtocolError, match="seals"):
        mapped(received(upload), LENGTH_BYTES, is_writable=False)


@pytest.mark.parametrize("is_writable", [False, True])
def test_memory_that_may_shrink_is_refused(is_writable: bool) -> None:
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, LENGTH_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with pytest.raises(ProtocolError, match="seals"):
        mapped(fd, LENGTH_BYTES, is_writable=is_writable)


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(LENGTH_BYTES))
    with pytest.raises(ProtocolError, match="no memfd"):
        mapped(os.open(path, os.O_RDONLY), LENGTH_BYTES, is_writable=False)


def test_another_size_than_announced_is_refused(shared: Segment) -> None:
    with pytest.raises(ProtocolError, match=f"{LENGTH_BYTES} bytes"):
        mapped(received(shared), LENGTH_BYTES // 2, is_writable=False)


def test_a_read_only_mapping_cannot_be_made_writable(shared: Segment) -> None:
    mapping = mapped(received(shared), LENGTH_BYTES, is_writable=False)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(mapping.address), ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE) == -1


CHILD = """
import os, resource, sys
from paramstore.memory.arena import *
from paramstore.memory.shared import Mapping
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
segment = allocate_shared(2 << 20, PageReport(PageKind.SMALL, PageKind.SMALL, ""))
buffer = memoryview(Mapping(segment.fd, 2 << 20, is_writable=False).buffer).cast("B")
if sys.argv[1] == "write":
    buffer[0] = 1
child = os.fork()
if child == 0:
    buffer[0]
    os._exit(0)
os.kill(os.getpid(), os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("act", ["write", "read in a forked child"])
def test_what_must_not_be_done_is_a_memory_fault(act: str) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, act], check=False, capture_output=True)
    assert done.returncode == -signal.SIGSEGV, done.stderr.decode()
