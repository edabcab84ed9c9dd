"""Ensures one daemon per store directory: an flock on a file in it, held for the life of the process. `holder` tells whose.

The file is empty and never removed, so that two daemons cannot hold locks on two files of the same name. The lock ends
with its last descriptor, which is close-on-exec; and the daemon never forks without exec.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from paramstore.errors import CatalogError, ConfigError, StoreLocked
from paramstore.holder import DAEMON_BYTE, LOCK_NAME, hold, holder
from paramstore.storage.mounts import DISK_FULL
from paramstore.storage.ownership import objection_to


class StoreLock:
    """A held lock. `StoreLock.take` makes one."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor: int | None = descriptor
        self.path = path

    @classmethod
    def take(cls, directory: Path, byte: int = DAEMON_BYTE) -> StoreLock:
        """Takes the lock on `directory`, without waiting; from then on the kernel tells who holds it. byte: the kind of holder.

        Raises StoreLocked naming the process that holds it; ConfigError if the lock file cannot be opened, or is none of ours: it
        is not changed then; CatalogError if the disk refuses it: it is full, read-only or fails.
        """
        path = directory / LOCK_NAME
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise _refusal(error)(f"store directory {directory}: cannot open its lock file: {error}") from error
        try:
            if objection := objection_to(os.fstat(descriptor)):
                raise ConfigError(f"store directory {directory}: its lock file {path} is not ours: {objection}")
            _lock(descriptor, directory)
            _show_holder(descriptor, path, byte)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, path)

    def release(self) -> None:
        """Gives the lock up; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreLocked(
            f"store directory {directory} is in use by process {holder(descriptor) or 'unknown'}: connect to that daemon, end it "
            f"with `paramstore stop {directory}`, which finds it where its socket is gone too, or use another --dir"
        ) from error
    except OSError as error:
        raise ConfigError(f"store directory {directory}: cannot lock it: {error}") from error


def _show_holder(descriptor: int, path: Path, byte: int) -> None:
    try:
        os.ftruncate(descriptor, 0)  # older versions wrote their process id, which stayed when the process had ended
        hold(descriptor, byte)
    except OSError as error:
        raise _refusal(error)(f"lock file {path}: cannot be written: {error}") from error


def _refusal(error: OSError) -> type[CatalogError | ConfigError]:
    """Chooses the error by whose fault it is: the disk's, which no setting mends, or that of whoever chose the directory."""
    return CatalogError if error.errno in (*DISK_FULL, errno.EROFS, errno.EIO) else ConfigError
