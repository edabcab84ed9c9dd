"""A volume's file as a client has it: a read-only descriptor, through which records of leased extents are read."""

from __future__ import annotations

import os


class VolumeFile:
    """Owner of a descriptor of its own, which goes with the last one who reads through it."""

    def __init__(self, fd: int) -> None:
        """fd: stays the caller's."""
        self.fd = -1  # for an interrupt in the next line
        self.fd = os.dup(fd)

    @property
    def path(self) -> str:
        """Path by which this process opens the same file once more, with flags of its own."""
        return f"/proc/self/fd/{self.fd}"

    def opened_direct(self) -> VolumeFile | None:
        """Opens the file once more, past the page cache; None where its file system refuses that."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return None
        try:
            return VolumeFile(descriptor)
        finally:
            os.close(descriptor)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
