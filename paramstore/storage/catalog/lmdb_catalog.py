"""The catalog in LMDB: one file, one durable transaction per `Change`, everything read into memory at open.

LMDB neither checks what it reads nor handles a device error gracefully, so these guards surround it:

- every value has a checksum, and `load` reads them all, so that a later device error can only hit `apply`;
- the pages of a failed flush are dropped before the file is read again, so that `reopen` sees what the disk has;
- `reserve` grows map and file before any data is written, and allocates the file's space, so that `apply` does not run out
  of room, whoever else fills the disk;
- `writemap=False`, both flushes on, one pinned engine version, one thread, no network or DAX file system;
- after an `apply` that raised, the outcome is unknown and nothing more is written until `reopen` and `load`.

The store's own lock (`storage.lock`) keeps a second daemon out; LMDB's would let it in.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from pathlib import Path

import lmdb

from paramstore.directories import flush_directory
from paramstore.errors import CatalogError, CorruptCatalog
from paramstore.storage.catalog import row_bytes as rows
from paramstore.storage.catalog.base import Change, Contents, NamespaceContents, Row
from paramstore.storage.mounts import DISK_FULL, check_catalog_place, free_bytes

ENGINE_VERSION = 0
"""Stands for LMDB 0.9; files of 1.0 have another format."""
READERS_MAX = 8
LOCK_NAME, LOCK_BYTES = "lock.mdb", (READERS_MAX + 2) * 64
"""File of LMDB's table of readers, with a cache line for each and two before them. It is written through a mapping."""
MAP_BYTES = 64 << 20
"""Size of a new map: address space only, doubled as needed."""
FIXED_BYTES_BOUND = 4 << 20
"""Bytes that a transaction can take beside its rows: a step's `extra`, namespaces, volumes, the free list."""
LIFE_COPIES = 4
"""How many copies of the kept rows the file has room for. LMDB uses a page again two transactions after it was given up, so the
file grows to the pages of three transactions (measured: 2.9 to 3.2 times the live ones), and `reserve` asks for one more copy."""
_CORRUPT = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.VersionMismatchError)


class LmdbCatalog:
    """A `Catalog` in the directory `path`. Every call, the constructor included, must be made on one thread."""

    def __init__(self, path: Path, *, store_uuid: bytes | None = None, map_bytes: int = MAP_BYTES) -> None:
        """Opens the catalog at `path`.

        store_uuid: 16 bytes for a catalog that is made now; one that exists keeps its own. None: must exist.
        map_bytes: the size of the map to begin with; `reserve` raises it.
        Raises CatalogError if the catalog is missing, of another format or engine, truncated, or on a file
        system that LMDB is not safe on.
        """
        assert store_uuid is None or len(store_uuid) == 16, "a uuid has 16 bytes"
        self._path = path
        self._map_bytes = map_bytes
        self._thread = threading.get_ident()
        self._ids: dict[str, int] | None = None
        """Number of each namespace; None before `load`, and while an outcome is unknown."""
        self._prepare(may_create=store_uuid is not None)
        is_new = not self._file.exists()
        try:
            self._environment = self._open(store_uuid)
        except BaseException:
            if is_new:
                self._file.unlink(missing_ok=True)  # a half-made file would be refused as a catalog when it is opened again
            raise

    def load(self) -> Contents:
        self._check_thread()
        try:
            with self._environment.begin() as transaction:
                contents, names = _read(transaction)
        except lmdb.Error as error:
            raise self._failure("cannot be read", error) from error
        except CatalogError as error:
            raise type(error)(f"catalog {self._path}: {error}") from error
        self._ids = {name: namespace_id for namespace_id, name in names.items()}
        return contents

    def reserve(self, row_count: int, *, kept_rows: int = 0) -> None:
        self._check_thread()
        needed_bytes = 0
        try:
            info, tree = self._environment.info(), self._environment.stat()
            used_pages = info["last_pgno"] + 1
            # A transaction copies the pages it touches, at worst all, before the old ones can be used again.
            copied_pages = tree["branch_pages"] + tree["leaf_pages"] + tree["overflow_pages"]
            next_bytes = (used_pages + copied_pages) * tree["psize"] + row_count * rows.ROW_BYTES_BOUND
            needed_bytes = max(next_bytes, LIFE_COPIES * kept_rows * rows.ROW_BYTES_BOUND) + FIXED_BYTES_BOUND
            if needed_bytes > info["map_size"]:
                self._map_bytes = 1 << (needed_bytes - 1).bit_length()
                self._environment.set_mapsize(self._map_bytes)
            _allocate(self._file, needed_bytes)
        except (lmdb.Error, OSError) as error:
            sizes = f"{needed_bytes} bytes needed, {_own_bytes(self._file)} are its own"
            raise self._failure(f"no room for {max(row_count, kept_rows)} rows: {sizes}", error) from error

    def apply(self, change: Change) -> None:
        self._check_thread()
        if self._ids is None:
            raise CatalogError(f"catalog {self._path}: not loaded since it was opened; nothing was written")
        ids, self._ids = self._ids, None
        after = _ids_after(ids, change)
        try:
            with self._environment.begin(write=True) as transaction:
                _write(transaction, change, ids, after)
        except lmdb.Error as error:
            raise self._failure("a transaction failed and its outcome is unknown until the catalog is reopened", error) from error
        self._ids = after

    def reopen(self) -> None:
        self._check_thread()
        self._ids = None
        self._environment.close()
        self._prepare(may_create=False)
        self._environment = self._open(None)

    def close(self) -> None:
        self._check_thread()
        self._ids = None
        self._environment.close()

    def _check_thread(self) -> None:
        assert threading.get_ident() == self._thread, "the catalog belongs to the thread that opened it"

    @property
    def _file(self) -> Path:
        return self._path / "data.mdb"

    def _prepare(self, *, may_create: bool) -> None:
        """Makes or checks the directory, and drops cached pages of the file, so that what is read is what the disk has."""
        check_catalog_place(self._path)
        try:
            if may_create:
                self._path.mkdir(mode=0o700, exist_ok=True)
                flush_directory(self._path.parent)
                flush_directory(self._path.parent.parent)
            if self._file.exists():
                descriptor = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)
            elif not may_create:
                raise CatalogError(f"catalog {self._path}: missing; restore it, or rebuild it")
            _allocate(self._path / LOCK_NAME, LOCK_BYTES)
        except OSError as error:
            raise self._failure("cannot be prepared", error) from error

    def _open(self, store_uuid: bytes | None) -> lmdb.Environment:
        """Opens the LMDB environment. store_uuid: for a new catalog; None if it must exist."""
        try:
            environment = lmdb.open(
                os.fsencode(self._path),  # lmdb would encode text strictly, which fails for a name that is no text in this locale
                map_size=self._map_bytes,
                lib_version=ENGINE_VERSION,
                max_readers=READERS_MAX,
                max_dbs=0,
                writemap=False,
                sync=True,
                metasync=True,
                readahead=False,
                mode=0o600,
            )
        except (lmdb.Error, OSError) as error:
            raise self._failure("cannot be opened as LMDB 0.9", error) from error
        try:
            flush_directory(self._path)
            self._check_length(environment)
            self._check_format(environment, store_uuid)
        except BaseException:
            environment.close()
            raise
        return environment

    def _check_length(self, environment: lmdb.Environment) -> None:
        """Refuses a truncated file: a page missing from the mapping would kill the process (SIGBUS)."""
        needed_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        found_bytes = self._file.stat().st_size
        if found_bytes < needed_bytes:
            raise CorruptCatalog(f"catalog {self._path}: truncated to {found_bytes} of {needed_bytes} bytes")

    def _check_format(self, environment: lmdb.Environment, store_uuid: bytes | None) -> None:
        """Checks that the format row is ours, or writes it into a new, empty catalog."""
        try:
            with environment.begin(write=store_uuid is not None) as transaction:
                value = transaction.get(rows.FORMAT_KEY)
                if value is None and store_uuid is not None and transaction.stat()["entries"] == 0:
                    value = rows.pack_format(store_uuid)
                    transaction.put(rows.FORMAT_KEY, value)
        except lmdb.Error as error:
            raise self._failure("its format row", error) from error
        if value is None:
            raise CatalogError(f"catalog {self._path}: an LMDB file without our format row")
        try:
            rows.unpack_format(bytes(value))
        except CatalogError as error:
            raise type(error)(f"catalog {self._path}: {error}") from error

    def _failure(self, what: str, error: Exception) -> CatalogError:
        """Translates an error of LMDB or of the system, and says what helps where something does."""
        text = f"catalog {self._path}: {what}: {error}"
        if isinstance(error, _CORRUPT):
            return CorruptCatalog(f"{text}; `paramstore fsck` tells what the volumes prove, and --rebuild makes it anew from them")
        if any(os.strerror(number) in str(error) for number in DISK_FULL):
            return CatalogError(f"{text}; its file system has {free_bytes(self._path)} bytes free: free some there, and try again")
        return CatalogError(text)


def _read(transaction: lmdb.Transaction) -> tuple[Contents, dict[int, str]]:
    """Reads everything, and the name for each namespace's number. Raises CorruptCatalog naming the wrong row."""
    contents = Contents(store_uuid=b"")
    names: dict[int, str] = {}
    by_id: dict[int, NamespaceContents] = {}
    key: bytes
    value: bytes
    for key, value in transaction.cursor():  # type: ignore[assignment]  # memoryviews only with buffers=True
        try:
            match key[0]:
                case rows.ROW_TAG:
                    namespace_id, expert_key, first_step = rows.read_row_key(key)
                    row = Row(first_step, rows.unpack_located(key, value))
                    by_id[namespace_id].rows.setdefault(expert_key, []).append(row)
                case rows.STEP_TAG:
                    step = rows.unpack_step(key, value)
                    by_id[rows.read_step_key(key)[0]].steps[step.step] = step
                case rows.NAMESPACE_TAG:
                    namespace = rows.unpack_namespace(key, value)
                    names[rows.read_number(key)] = namespace.name
                    found = NamespaceContents(namespace)
                    contents.namespaces[namespace.name] = by_id[rows.read_number(key)] = found
                case rows.VOLUME_TAG:
                    volume = rows.unpack_volume(key, value)
                    contents.volumes[volume.index] = volume
                case rows.FORMAT_TAG:
                    contents.store_uuid = rows.unpack_format(value)
                case _:
                    raise CorruptCatalog(f"{rows.describe_key(key)}: a newer program may have written it")
        except KeyError as error:
            raise CorruptCatalog(f"{rows.describe_key(key)}: there is no such namespace") from error
        except struct.error as error:
            raise CorruptCatalog(f"{rows.describe_key(key)}: not a key of ours") from error
    return contents, names


def _ids_after(ids: dict[str, int], change: Change) -> dict[str, int]:
    """The namespaces' numbers once `change` is applied; a new namespace gets a new one."""
    after = {name: namespace_id for name, namespace_id in ids.items() if name not in change.drop_namespaces}
    for row in change.put_namespaces:
        if row.name not in after:
            after[row.name] = max((*ids.values(), *after.values()), default=0) + 1
    return after


def _write(
    transaction: lmdb.Transaction, change: Change, before: dict[str, int], after: dict[str, int]
) -> None:
    """Writes `change`: drops, then puts. before, after: the namespaces' numbers."""
    for name in change.drop_namespaces:
        _drop_namespace(transaction, before[name])
    for name, key, first_step in change.drop_rows:
        _drop(transaction, rows.row_key(before[name], key, first_step))
    for name, step in change.drop_steps:
        _drop(transaction, rows.step_key(before[name], step))
    for namespace in change.put_namespaces:
        key_bytes = rows.namespace_key(after[namespace.name])
        transaction.put(key_bytes, rows.pack_namespace(key_bytes, namespace))
    for name, key, row in change.put_rows:
        key_bytes = rows.row_key(after[name], key, row.first_step)
        transaction.put(key_bytes, rows.pack_located(key_bytes, row.located))
    for name, step_row in change.put_steps:
        key_bytes = rows.step_key(after[name], step_row.step)
        transaction.put(key_bytes, rows.pack_step(key_bytes, step_row))
    for volume in change.put_volumes:
        key_bytes = rows.volume_key(volume.index)
        transaction.put(key_bytes, rows.pack_volume(key_bytes, volume))


def _drop(transaction: lmdb.Transaction, key: bytes) -> None:
    was_there = transaction.delete(key)
    assert was_there, f"{rows.describe_key(key)} is dropped, but not there"


def _drop_namespace(transaction: lmdb.Transaction, namespace_id: int) -> None:
    _drop(transaction, rows.namespace_key(namespace_id))
    for prefix in rows.prefixes_of(namespace_id):
        with transaction.cursor() as cursor:
            is_there = cursor.set_range(prefix)
            while is_there and bytes(cursor.key()).startswith(prefix):
                is_there = cursor.delete()


def _allocate(file: Path, size_bytes: int) -> None:
    """Makes the file if need be, and gives it `size_bytes` on the device: so neither a commit nor a write through a mapping, which
    would kill the process (SIGBUS), can meet a full file system. Raises OSError; then its size is as before."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        missing_bytes = size_bytes - _own_bytes(descriptor)
        if missing_bytes <= 0:
            return
        if free_bytes(descriptor) < missing_bytes:
            # Refused before trying: a request that cannot succeed must not fill the device for a moment.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)


def _own_bytes(file: Path | int) -> int:
    """Bytes of the file that are allocated to it: without its holes, and without what lies beyond its end."""
    status = os.stat(file)
    return min(status.st_size, status.st_blocks * 512)
