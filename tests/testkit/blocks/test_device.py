"""The server of block devices, asked as the kernel asks: what it takes is in image and log, what it cannot do is refused."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator

import pytest

from paramstore_testkit.blocks import device as block_device
from paramstore_testkit.blocks.device import FIRST_DISK_NODE, NOTES_NODE, ROOT, Server
from paramstore_testkit.blocks.log import read_log
from paramstore_testkit.disks.journal import Flushed, Noted, Wrote

DISK_BYTES = 64 << 10
UNIQUE = 77
_REQUEST = struct.Struct("<IIQQIIIHH")
_ANSWER = struct.Struct("<IiQ")


class Kernel:
    """Asks a server with two disks."""

    def __init__(self) -> None:
        self.log = os.memfd_create("log")
        self.disks = [os.memfd_create("disk") for _ in range(2)]
        for disk in self.disks:
            os.ftruncate(disk, DISK_BYTES)
        self.server = Server(log=self.log, disks=self.disks)

    def ask(self, opcode: int, node: int, body: bytes = b"") -> tuple[int, bytes] | None:
        """The error and the rest of the answer, if there is one."""
        request = _REQUEST.pack(_REQUEST.size + len(body), opcode, UNIQUE, node, 0, 0, 0, 0, 0) + body
        parts = self.server.answer(memoryview(request))
        if parts is None:
            return None
        answer = b"".join(parts)
        length_bytes, error, unique = _ANSWER.unpack_from(answer)
        assert (length_bytes, unique) == (len(answer), UNIQUE)
        return -error, answer[_ANSWER.size :]

    def write(self, node: int, offset_bytes: int, data: bytes) -> tuple[int, bytes] | None:
        return self.ask(block_device.WRITE, node, struct.pack("<QQI20x", 0, offset_bytes, len(data)) + data)

    def close(self) -> None:
        for descriptor in (self.log, *self.disks):
            os.close(descriptor)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.close()


def test_a_write_is_in_the_image_and_in_the_log_and_its_length_is_the_answer(kernel: Kernel) -> None:
    assert kernel.write(FIRST_DISK_NODE + 1, 4096, b"abcd") == (0, struct.pack("<II", 4, 0))
    assert os.pread(kernel.disks[1], 4, 4096) == b"abcd"
    assert os.pread(kernel.disks[0], 4, 4096) == bytes(4)
    assert list(read_log(kernel.log)) == [Wrote(1, 4096, b"abcd")]


def test_flushes_and_notes_stand_in_the_log_where_they_were_asked_for(kernel: Kernel) -> None:
    kernel.write(FIRST_DISK_NODE, 0, b"a")
    assert kernel.ask(block_device.FSYNC, FIRST_DISK_NODE) == (0, b"")
    assert kernel.write(NOTES_NODE, 0, b"3 acknowledged") == (0, struct.pack("<II", 14, 0))
    assert list(read_log(kernel.log)) == [Wrote(0, 0, b"a"), Flushed(0), Noted("acknowledged", 3)]


def test_a_read_gives_what_was_written(kernel: Kernel) -> None:
    kernel.write(FIRST_DISK_NODE, 512, b"abcd")
    assert kernel.ask(block_device.READ, FIRST_DISK_NODE, struct.pack("<QQI20x", 0, 510, 8)) == (0, b"\0\0abcd\0\0")


def test_only_disks_are_read(kernel: Kernel) -> None:
    assert kernel.ask(block_device.READ, NOTES_NODE, struct.pack("<QQI20x", 0, 0, 8)) == (errno.EACCES, b"")


@pytest.mark.parametrize(("name", "node"), [(b"notes", NOTES_NODE), (b"disk0", FIRST_DISK_NODE), (b"disk1", FIRST_DISK_NODE + 1)])
def test_a_name_leads_to_its_node(kernel: Kernel, name: bytes, node: int) -> None:
    found = kernel.ask(block_device.LOOKUP, ROOT, name + b"\0")
    assert found is not None
    assert found[0] == 0
    assert struct.unpack_from("<Q", found[1])[0] == node


@pytest.mark.parametrize("name", [b"disk2", b"disk", b"disk-1", b"other", b""])
def test_there_are_no_other_names(kernel: Kernel, name: bytes) -> None:
    assert kernel.ask(block_device.LOOKUP, ROOT, name + b"\0") == (errno.ENOENT, b"")


def test_a_request_that_is_not_known_is_refused_and_one_that_wants_no_answer_gets_none(kernel: Kernel) -> None:
    assert kernel.ask(43, FIRST_DISK_NODE) == (errno.ENOSYS, b"")  # FALLOCATE: a discard is no write
    assert kernel.ask(block_device.FORGET, FIRST_DISK_NODE) is None


def test_opening_keeps_the_page_cache_out(kernel: Kernel) -> None:
    assert kernel.ask(block_device.OPEN, FIRST_DISK_NODE) == (0, struct.pack("<QII", 0, block_device.FOPEN_DIRECT_IO, 0))
