"""The regular file beneath a volume: makes, opens and allocates it; reads and writes whole ranges.

- A transfer does all its bytes or raises VolumeError naming volume, file, offset and what was found.
- Space is allocated, never sparse, so a write inside the file cannot run out of it; a failed growth leaves
  the size as it was.
- After `create` and `open` the file, its name and its directory are durable, so bytes that were read can be
  relied on.
- Only one process has it open: it is locked.
- A symbolic link is never followed, an existing file is never taken for a new one, and a file of another user or with
  a second name is never taken for a volume.

Safe to call from several threads at once on disjoint ranges; growing is the caller's to serialise.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paramstore.errors import CorruptRecord, VolumeError
from paramstore.storage.mounts import free_bytes, shown
from paramstore.storage.ownership import objection_to
from paramstore.storage.volume.base import ALIGNMENT_BYTES, check_range

IOV_MAX = 1024
"""Buffers that one preadv or pwritev takes at most."""
LOCK_TRIES = 5
LOCK_PAUSE_S = 0.05
VOLUME_NAME = re.compile(r"volume-(\d{3,})\.data")


def volume_path(directory: Path, index: int) -> Path:
    """Path of volume `index`'s file. Only this function and `volume_indices` know how it is named."""
    return directory / f"volume-{index:03d}.data"


def volume_indices(directory: Path) -> list[int]:
    """Indices of the volumes that have a file in `directory`; empty where there is no such directory. Raises VolumeError."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise VolumeError(f"volume directory {directory}: {error.strerror}") from error
    return sorted(int(match[1]) for match in map(VOLUME_NAME.fullmatch, names) if match)


class BackingFile:
    """One open file; owns its descriptor. `place` names volume and file in messages; `size_bytes` is what may be used."""

    def __init__(self, path: Path, index: int, descriptor: int) -> None:
        self.path = path
        self.shown_path = shown(path)
        self.place = f"volume {index} ({self.shown_path})"
        self.size_bytes = 0
        self._descriptor = descriptor

    @classmethod
    def create(cls, directory: Path, *, index: int, size_bytes: int) -> BackingFile:
        """Makes a new file of zeros, at least `size_bytes` long. Raises VolumeError; then there is no new file."""
        path = volume_path(directory, index)
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            is_in_a_file = isinstance(error, FileExistsError | NotADirectoryError) and not directory.is_dir()
            reason = f"{directory} is no directory, or lies in a file" if is_in_a_file else error.strerror
            raise VolumeError(f"volume {index}: cannot create {path}: {reason}") from error
        file = cls(path, index, descriptor)
        try:
            file._lock()
            file.allocate(size_bytes)
            file._make_name_durable()
        except VolumeError:
            file.discard()
            raise
        return file

    @classmethod
    def open(cls, directory: Path, *, index: int) -> BackingFile:
        """Opens the file that `create` made, and makes everything durable that an earlier process wrote to it. Raises VolumeError,
        CorruptRecord if it is too short for a volume."""
        path = volume_path(directory, index)
        try:
            # Non-blocking, so that a FIFO in its place is refused below instead of being waited for.
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise VolumeError(f"volume {index}: cannot open {path}: {reason}") from error
        file = cls(path, index, descriptor)
        try:
            file._lock()
            file._adopt()
            file._make_name_durable()
        except VolumeError:
            file.close()
            raise
        return file

    @property
    def descriptor(self) -> int:
        """The descriptor, for calls that this class does not make; this object goes on owning it."""
        return self._descriptor

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        """Fills the buffers, one after the other. Raises VolumeError; then they hold garbage."""
        length_bytes = check_range(offset_bytes, into, size_bytes=self.size_bytes, place=self.place)
        buffers, done_bytes = into, 0
        while done_bytes < length_bytes:
            try:
                count_bytes = os.preadv(self._descriptor, buffers[:IOV_MAX], offset_bytes + done_bytes)
            except OSError as error:
                raise self._failure("read", offset_bytes, length_bytes, error.strerror) from error
            done_bytes += count_bytes
            if done_bytes < length_bytes:
                self.check_length(offset_bytes, length_bytes)
                if count_bytes == 0:
                    raise self._failure("read", offset_bytes, length_bytes, f"nothing came after {done_bytes} bytes")
                buffers = _after(into, done_bytes)

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        """Writes the buffers, one after the other. Raises VolumeError; then the range holds garbage."""
        length_bytes = check_range(offset_bytes, data, size_bytes=self.size_bytes, place=self.place)
        buffers, done_bytes = data, 0
        while done_bytes < length_bytes:
            try:
                count_bytes = os.pwritev(self._descriptor, buffers[:IOV_MAX], offset_bytes + done_bytes)
            except OSError as error:
                raise self._failure("write", offset_bytes, length_bytes, error.strerror) from error
            done_bytes += count_bytes
            if done_bytes < length_bytes:
                if count_bytes == 0:
                    raise self._failure("write", offset_bytes, length_bytes, f"nothing was taken after {done_bytes} bytes")
                buffers = _after(data, done_bytes)

    def sync(self) -> None:
        """Makes everything written before durable. Raises VolumeError; then calling again proves nothing."""
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise VolumeError(f"{self.place}: flush failed: {error.strerror}") from error

    def check_length(self, offset_bytes: int, length_bytes: int) -> None:
        """Raises VolumeError if the file ends before the range does: somebody truncated it."""
        found_bytes = os.fstat(self._descriptor).st_size
        if found_bytes < offset_bytes + length_bytes:
            raise VolumeError(
                f"{self.place}: cannot transfer {length_bytes} bytes at offset {offset_bytes}: the file was "
                f"truncated to {found_bytes} bytes, expected {self.size_bytes}"
            )

    def allocate(self, size_bytes: int) -> None:
        """Makes the file at least that large, rounded up to whole pages, with all its space allocated and durable.

        Raises VolumeError naming the bytes that are missing; the size is then as before.
        """
        size_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if size_bytes <= self.size_bytes:
            return  # large enough already
        if free_bytes(self._descriptor) < size_bytes - self.size_bytes:
            # Refused before trying: a request that cannot succeed must not fill the device for a moment.
            raise self._cannot_grow(size_bytes, "No space left on device")
        try:
            os.posix_fallocate(self._descriptor, self.size_bytes, size_bytes - self.size_bytes)
            self._sync_apart()
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self.size_bytes)
            raise self._cannot_grow(size_bytes, error.strerror) from error
        self.size_bytes = size_bytes

    def _sync_apart(self) -> None:
        """Makes the new size durable through a separate descriptor: the kernel tells each descriptor once of a write that was lost,
        and the one that transfers use must learn of it at its own flush."""
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def open_to_read(self) -> int:
        """Opens the file once more, read-only; the caller owns the descriptor. Raises VolumeError."""
        try:
            return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise VolumeError(f"{self.place} cannot be opened to be read: {error.strerror}") from error

    def set_direct(self, is_direct: bool) -> None:
        """Makes transfers bypass the page cache, or go through it. Raises OSError where the file system refuses."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if is_direct else flags)

    def discard(self) -> None:
        """Closes and removes the file, if making its volume failed."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._descriptor)

    def _lock(self) -> None:
        """Locks the volume, so that no other process opens it, from whatever store directory. Raises VolumeError.

        A process that was killed gives up the store's lock a moment before its volumes, so this tries more than once.
        """
        pause = threading.Event()
        for tries_left in reversed(range(LOCK_TRIES)):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if not tries_left:
                    raise VolumeError(f"{self.place} is in use by another process: stop that daemon or fsck first") from error
                pause.wait(LOCK_PAUSE_S)
            except OSError:
                return  # a file system without locks: the store's own lock is what there is
            else:
                return

    def _adopt(self) -> None:
        """Checks that the open file may be a volume, makes it durable, and takes its size."""
        status = os.fstat(self._descriptor)
        if objection := objection_to(status):
            raise VolumeError(f"{self.place} is not ours: {objection}")
        if status.st_size < ALIGNMENT_BYTES:
            raise CorruptRecord(f"{self.place} holds {status.st_size} bytes: not a volume, or a truncated one")
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise VolumeError(f"{self.place}: flush at open failed: {error.strerror}") from error
        self.size_bytes = status.st_size // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    def _make_name_durable(self) -> None:
        for directory in (self.path.parent, self.path.parent.parent):
            try:
                descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise VolumeError(f"{self.place}: cannot make directory {directory} durable: {error.strerror}") from error

    def _cannot_grow(self, size_bytes: int, reason: str | None) -> VolumeError:
        left_bytes = free_bytes(self._descriptor)
        missing_bytes = max(0, size_bytes - self.size_bytes - left_bytes)
        return VolumeError(
            f"{self.place}: cannot grow from {self.size_bytes} to {size_bytes} bytes: {reason}; {missing_bytes} "
            f"bytes are missing, {left_bytes} are free: free some, or put the volume elsewhere (--volume)"
        )

    def _failure(self, operation: str, offset_bytes: int, length_bytes: int, reason: str | None) -> VolumeError:
        return VolumeError(f"{self.place}: {operation} of {length_bytes} bytes at offset {offset_bytes} failed: {reason}")


def _after(buffers: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    """The rest of `buffers` when their first `done_bytes` have been transferred."""
    left = []
    for buffer in buffers:
        if done_bytes < buffer.nbytes:
            left.append(buffer.cast("B")[done_bytes:] if done_bytes else buffer)
        done_bytes = max(0, done_bytes - buffer.nbytes)
    return left
