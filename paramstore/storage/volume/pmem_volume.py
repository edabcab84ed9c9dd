"""A volume on persistent memory, through libpmem2; on an ordinary file (granularity `page`) it works the same, slower.

Writes are copies into the mapping. With granularity `byte` or `cache_line` they are persistent when `write`
returns, and `flush` has nothing left to do; with `page`, `flush` is fdatasync on the file, which covers what
was stored through the mapping and, unlike the library's own persist, reports a failing device as an error.
Where PMEM2_FORCE_GRANULARITY tells the library what to report, `flush` is fdatasync too, because a variable
proves nothing about the device.

Reads are preads of the same file: as fast as a copy out of the mapping where pages are large (0.8 to 1.0 of
it on ext4), and poisoned memory or a truncated file is an error, where a load would kill the process with
SIGBUS.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from paramstore.core.location import Tier
from paramstore.errors import VolumeError
from paramstore.storage.volume.backing_file import BackingFile
from paramstore.storage.volume.base import check_range
from paramstore_native.libpmem2 import FORCE_VARIABLE, Mapping

logger = logging.getLogger(__name__)

ON_PAGES = "not byte-addressable persistent memory: writes go through the page cache, `flush` makes them durable"
FORCED = f"{FORCE_VARIABLE} is set: the granularity is what it says, whatever the device is; `flush` makes writes durable"


class PmemVolume:
    """A mapped file as a volume. Safe for calls from several threads on disjoint ranges; use `create` or `open`.

    Growing maps the file anew; writes under way keep the old mapping, which goes when the last of them
    returns.
    """

    tier = Tier.PMEM

    def __init__(
        self, file: BackingFile, *, index: int, granularity: str, make_mapping: Callable[..., Mapping] = Mapping
    ) -> None:
        """granularity: the coarsest that will do. make_mapping: called as `Mapping` is. Raises VolumeError."""
        self.index = index
        self._file = file
        self._granularity = granularity
        self._make_mapping = make_mapping
        self._growing = threading.Lock()
        self._mapping = self._map(file.size_bytes)
        self._is_forced = FORCE_VARIABLE in os.environ
        self._reason = FORCED if self._is_forced else "" if self._mapping.persists_writes else ON_PAGES
        if self._reason:
            logger.warning("%s: %s", file.place, self._reason)

    @classmethod
    def create(cls, path: Path, *, index: int, size_bytes: int, granularity: str = "page") -> PmemVolume:
        """Makes a new volume of zeros in the directory `path`, its space allocated and its name durable.

        granularity: the coarsest that will do, `page`, `cache_line` or `byte`. Raises VolumeError if the
        file exists, space or the library is missing, or the device cannot do `granularity`; then no file is
        left behind.
        """
        file = BackingFile.create(path, index=index, size_bytes=size_bytes)
        try:
            return cls(file, index=index, granularity=granularity)
        except VolumeError:
            file.discard()
            raise

    @classmethod
    def open(cls, path: Path, *, index: int, granularity: str = "page") -> PmemVolume:
        """Opens the volume that `create` made in the directory `path`. Raises VolumeError."""
        file = BackingFile.open(path, index=index)
        try:
            return cls(file, index=index, granularity=granularity)
        except VolumeError:
            file.close()
            raise

    @property
    def size_bytes(self) -> int:
        return self._mapping.size_bytes

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        self._file.read(offset_bytes, into)

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        mapping = self._mapping  # kept for the whole call: `grow` may replace it meanwhile
        length_bytes = check_range(offset_bytes, data, size_bytes=mapping.size_bytes, place=self._file.place)
        self._file.check_length(offset_bytes, length_bytes)  # a store beyond the file's end would be SIGBUS
        mapping.write(offset_bytes, data)

    def flush(self) -> None:
        if self._is_forced or not self._mapping.persists_writes:
            self._file.sync()

    def grow(self, size_bytes: int) -> None:
        with self._growing:
            self._file.allocate(size_bytes)
            if self._file.size_bytes > self._mapping.size_bytes:
                self._mapping = self._map(self._file.size_bytes)

    def open_to_read(self) -> int:
        return self._file.open_to_read()

    def describe(self) -> dict[str, object]:
        return {
            "index": self.index,
            "tier": self.tier.value,
            "path": self._file.shown_path,
            "mode": "pmem",
            "granularity": self._mapping.granularity,
            "reason": self._reason,
            "size_bytes": self.size_bytes,
        }

    def close(self) -> None:
        del self._mapping
        self._file.close()

    def _map(self, size_bytes: int) -> Mapping:
        try:
            return self._make_mapping(self._file.descriptor, size_bytes=size_bytes, granularity=self._granularity)
        except VolumeError as error:
            raise VolumeError(f"{self._file.place}: cannot map with pmem_granularity={self._granularity}: {error}") from error
