"""Finds the process that holds a store's directory. The kernel names it; a process id in a file could be another's by now.

Whoever takes the directory has a record lock on a byte of its lock file (fcntl(2), F_SETLK): one byte is for daemons, one for
other programs. Anybody may ask which process has the lock (F_GETLK), and it ends with its process.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

LOCK_NAME = "lock"
DAEMON_BYTE, OTHER_BYTE = 0, 1
FLOCK = struct.Struct("hhqqi4x")
"""struct flock: kind, whence, start, length, process."""


def hold(descriptor: int, byte: int) -> None:
    """Locks `byte` for this process, until it ends or closes any descriptor of the file. Raises OSError."""
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)


def holder(descriptor: int, *, length: int = 2) -> int | None:
    """Returns the process that has the first lock among the first `length` bytes; None if no other process has one."""
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, length, 0))
    kind, _, _, _, process_id = FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else process_id


def daemon_of(directory: Path) -> int | None:
    """Returns the daemon that holds the store in `directory`, whether or not it can be reached; None if none does. Raises
    OSError."""
    return _holder_in(directory, length=1)


def is_held(directory: Path) -> bool:
    """Whether another process, a daemon or not, holds the store in `directory`. Raises OSError."""
    return _holder_in(directory, length=2) is not None


def _holder_in(directory: Path, *, length: int) -> int | None:
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return holder(descriptor, length=length)
    finally:
        os.close(descriptor)
