"""The LMDB catalog: the contract, and each of its guards."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from random import Random

import lmdb
import pytest

from paramstore.errors import CatalogError, CorruptCatalog
from paramstore.storage.catalog import lmdb_catalog, row_bytes
from paramstore.storage.catalog.base import STEP_ROWS_BOUND, Catalog, Change, StepRow, VolumeRow
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog
from paramstore.testing.catalogs import STORE_UUID, CatalogContract, namespace_row, row_of


class TestLmdbCatalog(CatalogContract):
    def make(self, path: Path) -> Catalog:
        catalog = LmdbCatalog(path / "catalog", store_uuid=STORE_UUID)
        catalog.load()
        return catalog

    def reopened(self, catalog: Catalog, path: Path) -> Catalog:
        catalog.close()
        return LmdbCatalog(path / "catalog")


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A closed catalog with one row of each kind."""
    catalog = LmdbCatalog(tmp_path / "catalog", store_uuid=STORE_UUID)
    catalog.load()
    catalog.apply(
        Change(
            put_namespaces=(namespace_row(),),
            put_rows=(row_of((3, 1), 7), row_of((3, 1), 8)),
            put_steps=(("moe", StepRow(8, 1, 0, 1, b"")),),
            put_volumes=(VolumeRow(2, b"v" * 16, 1 << 30, 0),),
        )
    )
    catalog.close()
    return tmp_path / "catalog"


def rewrite(path: Path, key: bytes, value: bytes | None) -> None:
    """Puts `value` under `key` behind the catalog's back; None deletes."""
    with lmdb.open(str(path), lib_version=0) as environment, environment.begin(write=True) as transaction:
        if value is None:
            assert transaction.delete(key)
        else:
            transaction.put(key, value)


def values(path: Path) -> dict[bytes, bytes]:
    with lmdb.open(str(path), lib_version=0, readonly=True) as environment, environment.begin() as transaction:
        return {bytes(key): bytes(value) for key, value in transaction.cursor()}


def test_a_flipped_bit_in_any_value_is_found_and_the_row_named(filled: Path) -> None:
    names = {
        row_bytes.NAMESPACE_TAG: "namespace number 1",
        row_bytes.VOLUME_TAG: "volume 2",
        row_bytes.STEP_TAG: "step 8",
        row_bytes.ROW_TAG: r"key \(3, 1\) from step [78] on",
        row_bytes.FORMAT_TAG: "format row",
    }
    for key, value in values(filled).items():
        for position in (0, len(value) - 1):
            flipped = bytearray(value)
            flipped[position] ^= 0x10
            rewrite(filled, key, bytes(flipped))
            with pytest.raises(CorruptCatalog, match=f"{names[key[0]]}.* does not match its checksum"):
                LmdbCatalog(filled).load()
        rewrite(filled, key, value)
    LmdbCatalog(filled).load()


def test_a_volume_s_row_from_before_its_bytes_were_counted_counts_from_zero(filled: Path) -> None:
    key = row_bytes.volume_key(2)
    rewrite(filled, key, row_bytes._seal(key, (b"v" * 16, 1 << 30, 4096)))
    catalog = LmdbCatalog(filled)
    assert catalog.load().volumes[2] == VolumeRow(2, b"v" * 16, 1 << 30, 4096, 0)
    counted = VolumeRow(2, b"v" * 16, 1 << 30, 4096, 77)
    catalog.apply(Change(put_volumes=(counted,)))
    catalog.close()
    catalog = LmdbCatalog(filled)
    assert catalog.load().volumes[2] == counted
    catalog.close()


def test_a_value_under_another_key_is_found(filled: Path) -> None:
    row = row_bytes.row_key(1, (3, 1), 7)
    rewrite(filled, row_bytes.row_key(1, (3, 2), 7), values(filled)[row])
    with pytest.raises(CorruptCatalog, match=r"key \(3, 2\)"):
        LmdbCatalog(filled).load()


@pytest.mark.parametrize("value", [b"", b"short", b"x" * 9])
def test_a_value_too_short_for_a_checksum_is_found(filled: Path, value: bytes) -> None:
    rewrite(filled, row_bytes.row_key(1, (3, 1), 7), value)
    with pytest.raises(CorruptCatalog, match="checksum"):
        LmdbCatalog(filled).load()


def test_a_row_without_its_namespace_is_found(filled: Path) -> None:
    rewrite(filled, row_bytes.namespace_key(1), None)
    with pytest.raises(CorruptCatalog, match="no such namespace"):
        LmdbCatalog(filled).load()


@pytest.mark.parametrize("key", [b"\x05short", b"\x02", b"\x7fnew"])
def test_a_key_that_is_not_ours_is_found(filled: Path, key: bytes) -> None:
    rewrite(filled, key, b"v" * 20)
    with pytest.raises(CorruptCatalog, match=key.hex()):
        LmdbCatalog(filled).load()


def test_a_catalog_of_another_format_version_is_refused(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_bytes, "FORMAT_VERSION", 2)
    with pytest.raises(CatalogError, match=r"of version 1; this program reads .* of version 2"):
        LmdbCatalog(filled)


def test_a_file_of_the_other_lmdb_engine_is_refused(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "catalog"), lib_version=1) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"k", b"v")
    with pytest.raises(CorruptCatalog, match=r"cannot be opened as LMDB 0\.9"):
        LmdbCatalog(tmp_path / "catalog")


def test_an_lmdb_file_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "catalog"), lib_version=0) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"theirs", b"v")
    for uuid in (None, STORE_UUID):
        with pytest.raises(CatalogError, match="without our format row"):
            LmdbCatalog(tmp_path / "catalog", store_uuid=uuid)
    assert values(tmp_path / "catalog") == {b"theirs": b"v"}


def test_a_missing_catalog_is_not_made_unless_asked(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="missing"):
        LmdbCatalog(tmp_path / "catalog")
    assert not (tmp_path / "catalog").exists()


def test_an_existing_catalog_keeps_its_uuid(filled: Path) -> None:
    assert LmdbCatalog(filled, store_uuid=b"x" * 16).load().store_uuid == STORE_UUID


def test_a_truncated_file_is_refused(filled: Path) -> None:
    os.truncate(filled / "data.mdb", 3 * 4096)
    with pytest.raises(CorruptCatalog, match="truncated to 12288 of"):
        LmdbCatalog(filled)


def test_garbage_instead_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"z" * 8192)
    with pytest.raises(CorruptCatalog, match="cannot be opened"):
        LmdbCatalog(tmp_path)


def test_the_same_catalog_is_not_opened_twice(filled: Path) -> None:
    catalog = LmdbCatalog(filled)
    with pytest.raises(CatalogError):
        LmdbCatalog(filled)
    catalog.close()


def test_another_thread_is_refused(filled: Path) -> None:
    catalog = LmdbCatalog(filled)
    errors = []

    def use() -> None:
        try:
            catalog.load()
        except AssertionError as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(errors) == 1
    catalog.close()


def test_reserve_grows_a_map_that_is_too_small(tmp_path: Path) -> None:
    catalog = LmdbCatalog(tmp_path / "catalog", store_uuid=STORE_UUID, map_bytes=1 << 16)
    catalog.load()
    catalog.apply(Change(put_namespaces=(namespace_row(experts=4000),)))
    for step in range(6):
        rows = tuple(row_of((0, expert), step) for expert in range(400 * step, 400 * step + 400))
        extra = ("moe", StepRow(step, step + 1, 0, 1, os.urandom(64 << 10)))
        catalog.reserve(len(rows))
        catalog.apply(Change(put_rows=rows, put_steps=(extra,)))
    assert len(catalog.load().namespaces["moe"].rows) == 2400
    catalog.close()


def test_what_was_reserved_is_allocated_in_the_file(tmp_path: Path) -> None:
    catalog = LmdbCatalog(tmp_path / "catalog", store_uuid=STORE_UUID)
    catalog.reserve(100_000)
    status = (tmp_path / "catalog" / "data.mdb").stat()
    assert status.st_blocks * 512 >= 100_000 * row_bytes.ROW_BYTES_BOUND
    catalog.close()


KEPT_STEPS = 5


def lives_on_a_full_disk(catalog: LmdbCatalog, *, experts: int, share: float, extra_bytes: int, commits: int) -> None:
    """Random commits that keep their newest steps, each reserved for as the daemon does, and dropped rows given back."""
    random = Random(7)
    steps: list[int] = []
    first_steps: dict[int, list[int]] = {expert: [] for expert in range(experts)}
    catalog.apply(Change(put_namespaces=(namespace_row(experts=experts),)))
    for step in range(commits):
        changed = [expert for expert in range(experts) if step == 0 or random.random() < share]
        steps.append(step)
        dropped = [steps.pop(0)] if len(steps) > KEPT_STEPS else []
        drop_rows = []
        for expert, firsts in first_steps.items():
            while len(firsts) > 1 and firsts[1] <= steps[0]:
                drop_rows.append(("moe", (0, expert), firsts.pop(0)))
        for expert in changed:
            first_steps[expert].append(step)
        catalog.reserve(2 * experts + 16)
        extra = random.randbytes(random.randint(0, extra_bytes))
        catalog.apply(
            Change(
                put_rows=tuple(row_of((0, expert), step, step) for expert in changed), drop_rows=tuple(drop_rows),
                put_steps=(("moe", StepRow(step, step, 0, len(changed), extra)),),
                drop_steps=tuple(("moe", old) for old in dropped),
            )
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("experts", [pytest.param(1000, id="1000 of 3000 experts"), pytest.param(3000, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("share", "extra_bytes"), [(1.0, 0), (0.3, 0), (0.5, 64 << 10)])
def test_a_long_life_needs_no_more_room_than_was_reserved_for_the_rows_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, extra_bytes: int, experts: int
) -> None:
    catalog = LmdbCatalog(tmp_path / "catalog", store_uuid=STORE_UUID)
    catalog.load()
    monkeypatch.setattr(lmdb_catalog, "FIXED_BYTES_BOUND", 0)  # what is kept has its room without that
    catalog.reserve(1, kept_rows=KEPT_STEPS * (experts + STEP_ROWS_BOUND))
    monkeypatch.setattr(os, "posix_fallocate", refuse_space)
    lives_on_a_full_disk(catalog, experts=experts, share=share, extra_bytes=extra_bytes, commits=200)
    catalog.close()


def refuse_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_is_reserved_for_a_life_is_allocated_at_once(tmp_path: Path) -> None:
    catalog = LmdbCatalog(tmp_path / "catalog", store_uuid=STORE_UUID)
    catalog.reserve(1, kept_rows=20_000)
    status = (tmp_path / "catalog" / "data.mdb").stat()
    assert status.st_blocks * 512 >= lmdb_catalog.LIFE_COPIES * 20_000 * row_bytes.ROW_BYTES_BOUND
    catalog.close()


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_full_disk_refuses_by_the_bytes_with_the_fix_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    catalog = LmdbCatalog(tmp_path / "catalog", store_uuid=STORE_UUID)
    before = (tmp_path / "catalog" / "data.mdb").stat().st_blocks
    if when == "before":
        monkeypatch.setattr(lmdb_catalog, "free_bytes", lambda place: 4096)
    else:
        monkeypatch.setattr(os, "posix_fallocate", refuse_space)
    with pytest.raises(CatalogError, match=r"no room for 5000 rows: \d+ bytes needed, .* bytes free: free some there") as caught:
        catalog.reserve(5000)
    assert type(caught.value) is CatalogError
    assert (tmp_path / "catalog" / "data.mdb").stat().st_blocks == before
    catalog.close()


def test_what_lmdb_maps_to_write_has_its_room_before_a_new_catalog_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LmdbCatalog(tmp_path / "catalog", store_uuid=STORE_UUID).close()
    assert (tmp_path / "catalog" / "lock.mdb").stat().st_size == lmdb_catalog.LOCK_BYTES, "LMDB needs no more"
    monkeypatch.setattr(lmdb_catalog, "free_bytes", lambda place: 0)
    with pytest.raises(CatalogError, match=r"cannot be prepared: .* has 0 bytes free: free some there"):
        LmdbCatalog(tmp_path / "other", store_uuid=STORE_UUID)
    assert not (tmp_path / "other" / "data.mdb").exists()
    LmdbCatalog(tmp_path / "catalog").close()  # one that has its room needs none


def test_a_new_catalog_that_could_not_be_made_leaves_no_half_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(lmdb_catalog, "flush_directory", lambda path: refuse_space() if path.name == "catalog" else None)
        with pytest.raises(OSError, match="No space left"):
            LmdbCatalog(tmp_path / "catalog", store_uuid=STORE_UUID)
    assert not (tmp_path / "catalog" / "data.mdb").exists()
    LmdbCatalog(tmp_path / "catalog", store_uuid=STORE_UUID).close()


def test_a_failed_apply_leaves_the_old_state_and_blocks_until_reopened(tmp_path: Path) -> None:
    catalog = LmdbCatalog(tmp_path / "catalog", store_uuid=STORE_UUID, map_bytes=1 << 16)
    catalog.load()
    catalog.apply(Change(put_namespaces=(namespace_row(experts=4000),)))
    too_much = Change(put_rows=tuple(row_of((0, expert), 1) for expert in range(4000)))
    with pytest.raises(CatalogError, match="outcome is unknown"):
        catalog.apply(too_much)
    with pytest.raises(CatalogError, match="nothing was written"):
        catalog.apply(Change(drop_namespaces=("moe",)))
    catalog.reopen()
    assert catalog.load().namespaces["moe"].rows == {}
    catalog.reserve(4000)
    catalog.apply(too_much)
    assert len(catalog.load().namespaces["moe"].rows) == 4000
    catalog.close()


def test_the_file_is_proven_durable_before_it_is_read(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(lmdb_catalog.os, "fsync", fail)
    with pytest.raises(CatalogError, match="Input/output error"):
        LmdbCatalog(filled)


@pytest.mark.slow
def test_fifty_thousand_rows_survive_and_are_few_bytes_each(tmp_path: Path) -> None:
    catalog = LmdbCatalog(tmp_path / "catalog", store_uuid=STORE_UUID)
    catalog.load()
    rows = tuple(row_of((layer, expert), 1, layer * 1000 + expert) for layer in range(50) for expert in range(1000))
    catalog.reserve(len(rows))
    catalog.apply(Change(put_namespaces=(namespace_row(),), put_rows=rows))
    loaded = catalog.load().namespaces["moe"].rows
    assert loaded == {key: [row] for _, key, row in rows}
    catalog.close()
    assert max(len(key) + len(value) for key, value in values(tmp_path / "catalog").items() if key[0] == 5) < 80
