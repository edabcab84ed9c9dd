"""Block devices that log what is done to them: a FUSE server whose files `disk0`, `disk1`, … stand under loop devices.

One process serves all devices and answers one request after the other, so its log has one order: a write or flush is in it
before it is answered, and a line that somebody writes to the file `notes` comes after everything answered before. Data never
waits in a cache of this kernel on the way (FOPEN_DIRECT_IO). When the server ends, every request ends with an error, so that
nobody waits for it for ever.

`python -m paramstore_testkit.blocks.device FUSE LOG DISK...` is the server, given descriptors; `BlockDevices` starts it.
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from paramstore_testkit.blocks.log import format_note, pack_flush, pack_note, pack_write
from paramstore_testkit.blocks.mounts import detach, mount, unmount

MODULE = "paramstore_testkit.blocks.device"
END_S = 10.0
WRITE_BYTES_MAX = 1 << 20
ROOT = 1
NOTES_NODE = 2
FIRST_DISK_NODE = 3
FOREVER_S = 1 << 20
"""Time for which the kernel may remember names and attributes, which never change."""

# Requests, flags and structures of linux/fuse.h.
LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, RELEASE = 1, 2, 3, 4, 14, 15, 16, 18
FSYNC, FLUSH, INIT, DESTROY, BATCH_FORGET, INTERRUPT = 20, 25, 26, 38, 42, 36
UNANSWERED = frozenset({FORGET, BATCH_FORGET, INTERRUPT})
FOPEN_DIRECT_IO = 1
BIG_WRITES, MAX_PAGES = 1 << 5, 1 << 22
MAJOR, MINOR = 7, 31
Part = bytes | memoryview
"""A part of an answer."""
_REQUEST = struct.Struct("<IIQQIIIHH")
_ANSWER = struct.Struct("<IiQ")
_INIT_ANSWER = struct.Struct("<IIIIHHIIHHI28x")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")
_ATTRIBUTES_ANSWER = struct.Struct("<QII")
_OPEN_ANSWER = struct.Struct("<QII")
_TRANSFER = struct.Struct("<QQI")
_WRITE_BYTES = 40
"""Length of the structure before a write's data."""


class Server:
    """Owner of the images while it serves. log, disks: descriptors."""

    def __init__(self, *, log: int, disks: list[int]) -> None:
        self._log = log
        self._images = [memoryview(mmap.mmap(disk, os.fstat(disk).st_size)) for disk in disks]
        self._requests: dict[int, Callable[[int, memoryview], list[Part]]] = {
            INIT: self._init, LOOKUP: self._look_up, GETATTR: self._describe, SETATTR: self._describe, OPEN: self._open,
            READ: self._read, WRITE: self._write, FSYNC: self._flush, FLUSH: self._nothing, RELEASE: self._nothing,
            DESTROY: self._nothing,
        }  # fmt: skip
        """What answers each opcode, from node and body. SETATTR changes nothing; FLUSH is a close."""

    def answer(self, request: memoryview) -> list[Part] | None:
        """Answers one request of the kernel; None where it wants no answer."""
        _, opcode, unique, node, *_ = _REQUEST.unpack_from(request)
        if opcode in UNANSWERED:
            return None
        try:
            parts, error = self._do(opcode, node, request[_REQUEST.size :]), 0
        except OSError as refusal:
            parts, error = [], refusal.errno or errno.EIO
        length_bytes = _ANSWER.size + sum(len(part) for part in parts)
        return [_ANSWER.pack(length_bytes, -error, unique), *parts]

    def _do(self, opcode: int, node: int, body: memoryview) -> list[Part]:
        do = self._requests.get(opcode)
        if do is None:
            raise OSError(errno.ENOSYS, f"request {opcode}")
        return do(node, body)

    def _init(self, _: int, body: memoryview) -> list[Part]:
        _, _, read_ahead_bytes, flags = struct.unpack_from("<IIII", body)
        flags &= BIG_WRITES | MAX_PAGES
        return [_INIT_ANSWER.pack(MAJOR, MINOR, read_ahead_bytes, flags, 16, 12, WRITE_BYTES_MAX, 1, WRITE_BYTES_MAX >> 12, 0, 0)]

    def _look_up(self, _: int, body: memoryview) -> list[Part]:
        found = self._node_of(bytes(body).rstrip(b"\0").decode())
        return [_ENTRY.pack(found, 0, FOREVER_S, FOREVER_S, 0, 0), self._attributes(found)]

    def _describe(self, node: int, _: memoryview) -> list[Part]:
        return [_ATTRIBUTES_ANSWER.pack(FOREVER_S, 0, 0), self._attributes(node)]

    def _open(self, _: int, __: memoryview) -> list[Part]:
        return [_OPEN_ANSWER.pack(0, FOPEN_DIRECT_IO, 0)]

    def _nothing(self, _: int, __: memoryview) -> list[Part]:
        return []

    def _flush(self, node: int, _: memoryview) -> list[Part]:
        self._append(pack_flush(node - FIRST_DISK_NODE))
        return []

    def _write(self, node: int, body: memoryview) -> list[Part]:
        _, offset_bytes, length_bytes = _TRANSFER.unpack_from(body)
        data = body[_WRITE_BYTES : _WRITE_BYTES + length_bytes]
        if node == NOTES_NODE:
            self._append(pack_note(data))
        else:
            device = node - FIRST_DISK_NODE
            self._append(pack_write(device, offset_bytes, data))
            self._images[device][offset_bytes : offset_bytes + length_bytes] = data
        return [struct.pack("<II", length_bytes, 0)]

    def _read(self, node: int, body: memoryview) -> list[Part]:
        _, offset_bytes, length_bytes = _TRANSFER.unpack_from(body)
        if node < FIRST_DISK_NODE:
            raise OSError(errno.EACCES, "only disks are read")
        return [self._images[node - FIRST_DISK_NODE][offset_bytes : offset_bytes + length_bytes]]

    def _append(self, record: bytes) -> None:
        os.write(self._log, record)

    def _node_of(self, name: str) -> int:
        if name == "notes":
            return NOTES_NODE
        number = name.removeprefix("disk")
        if name.startswith("disk") and number.isdecimal() and int(number) < len(self._images):
            return FIRST_DISK_NODE + int(number)
        raise OSError(errno.ENOENT, name)

    def _attributes(self, node: int) -> bytes:
        size_bytes = len(self._images[node - FIRST_DISK_NODE]) if node >= FIRST_DISK_NODE else 0
        mode = 0o040700 if node == ROOT else 0o100600
        return _ATTRIBUTES.pack(node, size_bytes, size_bytes // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def serve(fuse: int, server: Server) -> None:
    """Answers requests until the file system is unmounted."""
    buffer = bytearray(WRITE_BYTES_MAX + mmap.PAGESIZE)
    view = memoryview(buffer)
    while True:
        try:
            length_bytes = os.readv(fuse, [buffer])
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno == errno.ENOENT:  # the kernel took the request back
                continue
            if error.errno == errno.ENODEV:
                return
            raise
        answer = server.answer(view[:length_bytes])
        if answer is not None:
            os.writev(fuse, answer)


class BlockDevices:
    """Serves `images`, memfds of whole pages, as the files `path(0)`, `path(1)`, … below `directory`. A context manager."""

    def __init__(self, directory: Path, images: list[int]) -> None:
        self._directory = directory
        self._images = images
        self.log = os.memfd_create("paramstore-block-log")
        """The descriptor for `read_log`."""
        self._notes = -1
        self._process: subprocess.Popen[bytes] | None = None

    def path(self, index: int) -> Path:
        return self._directory / f"disk{index}"

    def note(self, what: str, step: int = 0) -> None:
        """Writes a note into the log: it comes after all that was answered before, and before all that is asked for later."""
        os.write(self._notes, format_note(what, step))

    def stop(self) -> None:
        """Stops the server, which keeps its requests: whoever waits for one waits until the server is killed."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Kills the server: what was asked of it, and whatever will be, ends with an error."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_S)

    def __enter__(self) -> Self:
        self._directory.mkdir()
        fuse = os.open("/dev/fuse", os.O_RDWR)
        try:
            options = f"fd={fuse},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
            mount("paramstore-block", self._directory, "fuse", options)
            arguments = [str(descriptor) for descriptor in (fuse, self.log, *self._images)]
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *arguments], pass_fds=(fuse, self.log, *self._images), stdin=subprocess.DEVNULL
            )
        finally:
            os.close(fuse)  # now the server alone holds it, so the connection ends with it
        self._notes = os.open(self._directory / "notes", os.O_WRONLY)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process is not None
        try:
            if self._notes >= 0:
                os.close(self._notes)
            if error is None:
                unmount(self._directory)
                self._process.wait(END_S)
        finally:
            detach(self._directory)
            self.kill()


def main() -> None:
    fuse, log, *disks = map(int, sys.argv[1:])
    serve(fuse, Server(log=log, disks=disks))


if __name__ == "__main__":
    main()
