"""`os` as a file's owner sees it, with calls that fail or do less than was asked; and a store's volumes in real files.

`FaultyOs` takes the place of `os` in a module; calls that it does not count it passes on. A short count is half of what was
asked, in whole sectors, and no failure; `zero` is a count of nothing at all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paramstore.core.location import Tier
from paramstore.storage.volume.backing_file import volume_path
from paramstore.storage.volume.file_volume import FileVolume
from paramstore.testing.volumes import SECTOR_BYTES, Keep
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.trials.io_faults import RECORDS_START_BYTES, Range, Script, ScriptedCatalog
from paramstore_testkit.trials.io_trial import HOST_BYTES, LIMIT_S, Disks

TRANSFER_KINDS = ("EIO", "ENOSPC", "EINTR", "short", "zero")
OTHER_KINDS = ("EIO", "ENOSPC", "EINTR")
OS_SITES = {
    "preadv": TRANSFER_KINDS, "pwritev": TRANSFER_KINDS, "fdatasync": OTHER_KINDS, "fsync": OTHER_KINDS,
    "posix_fallocate": OTHER_KINDS, "open": OTHER_KINDS,
}  # fmt: skip
"""Calls that are counted, and the ways in which each can fail."""


class Switches(Script):
    """A script that others write: each call of one of OS_SITES fails for as long as a file of its name lies in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def kind_of_failure(self, site: str) -> str | None:
        return "EIO" if (self._folder / site).exists() else None


class FaultyOs:
    """A stand-in for `os` in a module."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def __getattr__(self, name: str) -> Any:  # whatever `os` has
        return getattr(os, name)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        kind = self._struck("preadv")
        if kind == "zero":
            return 0
        return os.preadv(descriptor, _first_half(buffers) if kind == "short" else buffers, offset_bytes)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        end = offset_bytes + sum(buffer.nbytes for buffer in buffers)
        if offset_bytes >= RECORDS_START_BYTES:
            self._script.check_fresh(descriptor, offset_bytes, end)
        try:
            kind = self._struck("pwritev")
        except OSError:
            self._script.failed.append(Range(descriptor, offset_bytes, end))
            raise
        if kind == "zero":
            self._script.failed.append(Range(descriptor, offset_bytes, end))
            return 0
        return os.pwritev(descriptor, _first_half(buffers) if kind == "short" else buffers, offset_bytes)

    def fdatasync(self, descriptor: int) -> None:
        self._struck("fdatasync")
        os.fdatasync(descriptor)

    def fsync(self, descriptor: int) -> None:
        self._struck("fsync")
        os.fsync(descriptor)

    def posix_fallocate(self, descriptor: int, offset_bytes: int, length_bytes: int) -> None:
        self._struck("posix_fallocate")
        os.posix_fallocate(descriptor, offset_bytes, length_bytes)

    def open(self, path: str | Path, flags: int, mode: int = 0o777) -> int:
        self._struck("open")
        return os.open(path, flags, mode)

    def _struck(self, site: str) -> str | None:
        """Says how the count of this call is wrong; None if it is right. Raises OSError if the call fails."""
        kind = self._script.kind_of_failure(site)
        if kind is None or kind in ("short", "zero"):
            return kind
        number = getattr(errno, kind)
        raise OSError(number, os.strerror(number))


def _first_half(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Takes the first half of all bytes, in whole sectors, at least one of them."""
    left = max(SECTOR_BYTES, sum(buffer.nbytes for buffer in buffers) // 2 // SECTOR_BYTES * SECTOR_BYTES)
    half = []
    for buffer in buffers:
        if left > 0:
            half.append(buffer.cast("B")[:left])
            left -= buffer.nbytes
    return half


class FileDisk:
    """A file volume that a machine's crash closes and opens again: only the process is killed, so the page cache stays."""

    tier = Tier.NVME

    def __init__(self, directory: Path, index: int) -> None:
        self.index = index
        self._directory = directory
        self._volume = FileVolume.open(directory, index=index)
        self.read, self.write = self._volume.read, self._volume.write
        self.flush, self.grow = self._volume.flush, self._volume.grow

    @property
    def size_bytes(self) -> int:
        return self._volume.size_bytes

    def describe(self) -> dict[str, object]:
        return self._volume.describe()

    def crash(self, keep: Keep) -> None:
        """Closes and opens the file. Every write that returned is in it: `keep` has no say."""
        self._volume.close()
        self.__init__(self._directory, self.index)  # type: ignore[misc]

    def close(self) -> None:
        self._volume.close()


class FileDisks:
    """Volumes of a simulated store as files, from which a trial starts. `directory` is for them alone."""

    def __init__(self, disks: Disks, directory: Path) -> None:
        self._catalog = disks.catalog
        self._directory = directory
        self._sizes = {index: image.size_bytes for index, image in disks.images.items()}
        self._pages = {index: image.pages() for index, image in disks.images.items()}
        self._open: list[FileDisk] = []

    def machine(self, seed: int, script: Script) -> Machine:
        self.close()
        machine = Machine(seed=seed, volume_count=0, host_budget_bytes=4 * HOST_BYTES, wait_timeout_s=LIMIT_S)
        for index, size_bytes in self._sizes.items():
            with volume_path(self._directory, index).open("wb") as file:
                file.truncate(size_bytes)
                for offset_bytes, page in self._pages[index]:
                    os.pwrite(file.fileno(), page, offset_bytes)
        self._open = [FileDisk(self._directory, index) for index in self._sizes]
        machine.disks = {disk.index: disk for disk in self._open}  # type: ignore[misc]  # these crash as simulated ones do
        machine.volumes = {disk.index: disk for disk in self._open}
        machine.durable = self._catalog.crash()
        self._catalog.reopen()
        machine.catalog = ScriptedCatalog(machine.durable, script)
        return machine

    def close(self) -> None:
        """Gives back the files of the last machine."""
        for disk in self._open:
            disk.close()
        self._open = []

