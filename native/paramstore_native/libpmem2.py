"""Maps a file by libpmem2 (PMDK) with a known store granularity, and makes copies into it that persist.

Granularity is what the library can promise of the mapping, named as the setting `pmem_granularity` names it:

- `byte`, `cache_line`: a DAX file on persistent memory; `Mapping.write` returns when bytes are persistent;
- `page`: an ordinary file; written bytes become durable only by fdatasync on the file.

With `page`, neither the library's memcpy nor its persist is used: both msync at every call (1.5 against 2.2 GB/s for
copies of 64 MiB), and both abort the process when the device fails, where a store must raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import cffi

from paramstore.errors import VolumeError

SONAME = "libpmem2.so.1"
FORCE_VARIABLE = "PMEM2_FORCE_GRANULARITY"
"""The library's own switch: makes it promise a granularity whatever the device is. For tests."""
GRANULARITIES = ("byte", "cache_line", "page")
"""Names of granularities, in the order of the library's enum."""
NO_DRAIN, NO_FLUSH = 1, 2
"""Flags of the library's memcpy: do not wait for the lines that were written back; do not even write them back."""

_ffi = cffi.FFI()
_ffi.cdef(
    """
    struct pmem2_source;
    struct pmem2_config;
    struct pmem2_map;
    typedef void *(*pmem2_memcpy_fn)(void *pmemdest, const void *src, size_t len, unsigned flags);
    int pmem2_source_from_fd(struct pmem2_source **source, int fd);
    int pmem2_source_delete(struct pmem2_source **source);
    int pmem2_config_new(struct pmem2_config **config);
    int pmem2_config_delete(struct pmem2_config **config);
    int pmem2_config_set_length(struct pmem2_config *config, size_t length);
    int pmem2_config_set_required_store_granularity(struct pmem2_config *config, int granularity);
    int pmem2_map_new(
        struct pmem2_map **map, const struct pmem2_config *config, const struct pmem2_source *source);
    int pmem2_map_delete(struct pmem2_map **map);
    void *pmem2_map_get_address(struct pmem2_map *map);
    int pmem2_map_get_store_granularity(struct pmem2_map *map);
    pmem2_memcpy_fn pmem2_get_memcpy_fn(struct pmem2_map *map);
    const char *pmem2_errormsg(void);
    void *memcpy(void *target, const void *source, size_t length);
    """
)
_libc: Any = _ffi.dlopen(None)  # its functions are known at run time only


@cache
def load() -> Any:  # cffi's library object has no type of its own
    """The library. Raises VolumeError that says how to get it where it is missing."""
    try:
        return _ffi.dlopen(SONAME)
    except OSError as error:
        raise VolumeError(
            f"{SONAME} cannot be loaded ({error}): install it (apt install libpmem2, dnf install libpmem2), "
            f"or use volumes that are not pmem"
        ) from error


def missing_reason() -> str:
    """Why the library cannot be used; empty where it can."""
    try:
        load()
    except VolumeError as error:
        return str(error)
    return ""


class Stores(Protocol):
    """The calls that store into one mapped file; `MappedFile` makes the real ones.

    granularity: what the mapping has, one of GRANULARITIES; at least as fine as what was required.
    """

    granularity: str

    def copy(self, offset_bytes: int, source: memoryview) -> None:
        """Stores the bytes and no more: nothing says when they persist, or in which order."""
        ...

    def copy_and_persist(self, offset_bytes: int, source: memoryview, flags: int) -> None:
        """pmem2_memcpy: stores the bytes, writes back each cache line (a *flush*), waits for that (a *drain*). flags: 0, or which
        of these to leave out. A drain covers the flushes of its own thread alone."""
        ...


class MappedFile:
    """The first `size_bytes` of a file, mapped shared and writable until the last reference to it is gone."""

    def __init__(self, descriptor: int, *, size_bytes: int, granularity: str) -> None:
        """descriptor: open for reading and writing; it may be closed afterwards. Raises VolumeError."""
        self._library = load()
        self._map = self._new_map(descriptor, size_bytes, GRANULARITIES.index(granularity))
        self.granularity = GRANULARITIES[self._library.pmem2_map_get_store_granularity(self._map[0])]
        self._address = _ffi.cast("char *", self._library.pmem2_map_get_address(self._map[0]))
        self._copy_and_persist = self._library.pmem2_get_memcpy_fn(self._map[0])

    def copy(self, offset_bytes: int, source: memoryview) -> None:
        _libc.memcpy(self._address + offset_bytes, _ffi.from_buffer(source), source.nbytes)

    def copy_and_persist(self, offset_bytes: int, source: memoryview, flags: int) -> None:
        self._copy_and_persist(self._address + offset_bytes, _ffi.from_buffer(source), source.nbytes, flags)

    def _new_map(self, descriptor: int, size_bytes: int, granularity: int) -> Any:
        """A `struct pmem2_map **` that unmaps itself when it is collected."""
        library = self._library
        source, config = _ffi.new("struct pmem2_source **"), _ffi.new("struct pmem2_config **")
        mapping = _ffi.new("struct pmem2_map **")
        try:
            self._check(library.pmem2_source_from_fd(source, descriptor))
            self._check(library.pmem2_config_new(config))
            self._check(library.pmem2_config_set_length(config[0], size_bytes))
            self._check(library.pmem2_config_set_required_store_granularity(config[0], granularity))
            self._check(library.pmem2_map_new(mapping, config[0], source[0]))
        finally:
            library.pmem2_config_delete(config)
            library.pmem2_source_delete(source)
        return _ffi.gc(mapping, library.pmem2_map_delete)

    def _check(self, code: int) -> None:
        if code:
            message = _ffi.string(self._library.pmem2_errormsg())
            assert isinstance(message, bytes)
            raise VolumeError(f"libpmem2: {message.decode(errors='replace')} (code {code})")


class Mapping:
    """The first `size_bytes` of a file, to be written through a mapping.

    granularity: what the mapping has, one of GRANULARITIES; at least as fine as what was required.
    """

    def __init__(
        self, descriptor: int, *, size_bytes: int, granularity: str, make_stores: Callable[..., Stores] = MappedFile
    ) -> None:
        """descriptor: open for reading and writing; it may be closed afterwards. make_stores: as `MappedFile` is made.

        Raises VolumeError.
        """
        self.size_bytes = size_bytes
        self._stores = make_stores(descriptor, size_bytes=size_bytes, granularity=granularity)
        self.granularity = self._stores.granularity

    @property
    def persists_writes(self) -> bool:
        """Whether `write` makes its bytes persistent; else only fdatasync on the file does."""
        return self.granularity != "page"

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        """Copies the buffers, one after the other, to `offset_bytes`. Other threads run meanwhile.

        The file must be as long as the mapping: storing beyond its end kills the process with SIGBUS.
        """
        assert 0 <= offset_bytes <= self.size_bytes - sum(view.nbytes for view in data)
        for view in data:
            if self.persists_writes:
                # No NODRAIN: a drain covers the stores of its own thread alone, not those a flush came for.
                self._stores.copy_and_persist(offset_bytes, view, 0)
            else:
                self._stores.copy(offset_bytes, view)
            offset_bytes += view.nbytes
