"""Volumes as fsck sees them: bytes at offsets, read without leaving a trace. A rebuild alone opens them for writing."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Protocol

from paramstore.errors import VolumeError


class Disk(Protocol):
    """One volume. index: its number, by its file's name or by its position among the paths that were given."""

    @property
    def index(self) -> int: ...

    @property
    def place(self) -> str:
        """Name of the volume in messages."""
        ...

    @property
    def size_bytes(self) -> int: ...

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Reads exactly these bytes; offset and length are whole pages. Raises VolumeError."""
        ...


class WritableDisk(Disk, Protocol):
    """A disk that a rebuild may repair."""

    def write(self, offset_bytes: int, data: bytes) -> None:
        """Writes whole pages, durable after `flush`. Raises VolumeError."""
        ...

    def flush(self) -> None: ...


def volume_file(directory: Path, index: int) -> Path:
    """Path of volume `index` in the directory that was given for it, as docs/format.md names it."""
    return directory / f"volume-{index:03d}.data"


def volume_index(directory: Path, position: int) -> int:
    """Index of the volume in the directory at `position`: by its file's name, if there is just one such file, else `position`."""
    try:
        names = [path.name for path in directory.glob("volume-*.data")]
    except OSError:
        return position  # the directory may not be looked at
    number = names[0].removeprefix("volume-").removesuffix(".data") if len(names) == 1 else ""
    return int(number) if number.isdecimal() else position


class FileDisk:
    """A volume's file. Opened for reading, it cannot be changed. While it is open, nobody else writes to it: it is locked itself,
    since the lock of a store's directory does not cover volumes that were given with another directory."""

    def __init__(self, directory: Path, index: int, *, is_writable: bool = False) -> None:
        """Raises VolumeError if there is no such file, it is not a regular one, or somebody writes to it."""
        self.index = index
        path = volume_file(directory, index)
        self.place = f"volume {index} ({path})"
        flags = (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._descriptor = os.open(path, flags)
        except OSError as error:
            raise VolumeError(f"{self.place}: cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_EX if is_writable else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise VolumeError(f"{self.place} is in use by another process: stop that daemon or fsck first") from error
        except OSError:
            pass  # a file system without locks: the store's own lock has to do
        try:
            self.size_bytes = os.lseek(self._descriptor, 0, os.SEEK_END)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except OSError as error:
            os.close(self._descriptor)
            raise VolumeError(f"{self.place}: is no regular file: {error.strerror}") from error

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        parts, done_bytes = [], 0
        while done_bytes < length_bytes:
            try:
                part = os.pread(self._descriptor, length_bytes - done_bytes, offset_bytes + done_bytes)
            except OSError as error:
                raise VolumeError(f"{self.place}: {length_bytes} bytes at offset {offset_bytes}: {error.strerror}") from error
            if not part:
                raise VolumeError(f"{self.place}: ends before {length_bytes} bytes at offset {offset_bytes}")
            parts.append(part)
            done_bytes += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, offset_bytes: int, data: bytes) -> None:
        done_bytes = 0
        while done_bytes < len(data):
            try:
                done_bytes += os.pwrite(self._descriptor, data[done_bytes:], offset_bytes + done_bytes)
            except OSError as error:
                raise VolumeError(f"{self.place}: writing at offset {offset_bytes}: {error.strerror}") from error

    def flush(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise VolumeError(f"{self.place}: flush: {error.strerror}") from error

    def close(self) -> None:
        os.close(self._descriptor)
