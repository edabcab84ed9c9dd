"""Catalogs without LMDB, catalogs that fail, and the contract that every catalog passes.

MemoryCatalog keeps what a completed `apply` has made durable. FaultyCatalog fails one `apply`, before or after it
took effect, as an LMDB commit does whose outcome is unknown. CatalogContract is subclassed by the tests of each.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent, Identity, Located
from paramstore.errors import CatalogError
from paramstore.storage.catalog.base import Catalog, Change, Contents, NamespaceContents, NamespaceRow, Row, StepRow, VolumeRow

STORE_UUID = bytes(range(16))


class MemoryCatalog:
    """Owner of the durable contents. `crash` makes the catalog that the next process opens."""

    def __init__(self, contents: Contents | None = None, *, store_uuid: bytes = STORE_UUID) -> None:
        self._durable = copy.deepcopy(contents) if contents is not None else Contents(store_uuid)
        self._is_open = True
        self._is_loaded = False

    def load(self) -> Contents:
        self._check_open()
        self._is_loaded = True
        return _copy(self._durable)

    def reserve(self, row_count: int, *, kept_rows: int = 0) -> None:
        self._check_open()

    def apply(self, change: Change) -> None:
        self._check_open()
        if not self._is_loaded:
            raise CatalogError("memory catalog: not loaded since it was opened; nothing was written")
        after = _copy(self._durable)
        _change(after, copy.deepcopy(change))
        self._durable = after

    def reopen(self) -> None:
        self._is_open, self._is_loaded = True, False

    def close(self) -> None:
        self._is_open = False

    def crash(self) -> MemoryCatalog:
        """Gives the catalog that is left when the process dies: it has exactly what was durable. This one is of no use any more."""
        self.close()
        successor = MemoryCatalog()
        successor._durable = copy.deepcopy(self._durable)
        return successor

    def _check_open(self) -> None:
        if not self._is_open:
            raise CatalogError("memory catalog: it is closed")


class WrappedCatalog:
    """`inner` as it is: a base for catalogs that do one thing differently."""

    def __init__(self, inner: Catalog) -> None:
        self.inner = inner

    def load(self) -> Contents:
        return self.inner.load()

    def reserve(self, row_count: int, *, kept_rows: int = 0) -> None:
        self.inner.reserve(row_count, kept_rows=kept_rows)

    def apply(self, change: Change) -> None:
        self.inner.apply(change)

    def reopen(self) -> None:
        self.inner.reopen()

    def close(self) -> None:
        self.inner.close()


class FaultyCatalog(WrappedCatalog):
    """`inner`, but the `fail_at`-th `apply` (from 1; 0: none) raises CatalogError; `outcome` says whether it took effect.

    Until `reopen`, every later `apply` raises too and changes nothing, as LMDB's panic does.
    """

    def __init__(self, inner: Catalog, *, fail_at: int, outcome: Literal["lost", "durable"]) -> None:
        super().__init__(inner)
        self.applies = 0
        self._fail_at = fail_at
        self._outcome: Literal["lost", "durable"] = outcome
        self._is_panicked = False

    def fail_next(self, outcome: Literal["lost", "durable"]) -> None:
        """Lets the next `apply` raise."""
        self._fail_at, self._outcome = self.applies + 1, outcome

    def apply(self, change: Change) -> None:
        if self._is_panicked:
            raise CatalogError("faulty catalog: the outcome of an earlier transaction is unknown: reopen")
        self.applies += 1
        if self.applies != self._fail_at:
            self.inner.apply(change)
            return
        self._is_panicked = True
        if self._outcome == "durable":
            self.inner.apply(change)
        raise CatalogError(f"faulty catalog: transaction {self.applies} failed; its outcome is unknown")

    def reopen(self) -> None:
        self._is_panicked = False
        self.inner.reopen()


def _copy(contents: Contents) -> Contents:
    """Copies contents so that nothing that can change is shared. Only namespaces contain more than tables of values, and few tests
    have many namespaces: so this takes a tenth of the time of copying every row."""
    namespaces = {
        name: replace(
            found, namespace=copy.deepcopy(found.namespace), rows={key: list(rows) for key, rows in found.rows.items()},
            steps=dict(found.steps),
        )
        for name, found in contents.namespaces.items()
    }  # fmt: skip
    return replace(contents, namespaces=namespaces, volumes=dict(contents.volumes))


def _change(contents: Contents, change: Change) -> None:
    for name in change.drop_namespaces:
        del contents.namespaces[name]
    for name, key, first_step in change.drop_rows:
        rows = contents.namespaces[name].rows
        rows[key] = [row for row in rows[key] if row.first_step != first_step]
        if not rows[key]:
            del rows[key]
    for name, step in change.drop_steps:
        del contents.namespaces[name].steps[step]
    for namespace in change.put_namespaces:
        contents.namespaces.setdefault(namespace.name, NamespaceContents(namespace)).namespace = namespace
    for name, key, row in change.put_rows:
        rows = contents.namespaces[name].rows
        others = [other for other in rows.get(key, ()) if other.first_step != row.first_step]
        rows[key] = sorted([*others, row])
    for name, step_row in change.put_steps:
        contents.namespaces[name].steps[step_row.step] = step_row
    for volume in change.put_volumes:
        contents.volumes[volume.index] = volume


# --- the contract ---


def namespace_row(name: str = "moe", **changes: object) -> NamespaceRow:
    """Makes the row of a namespace of 2 layers and 4 experts; `changes` replace fields."""
    fields: dict[str, object] = {
        "name": name,
        "schema": {"kind": "param", "fields": [["w", [4, 4], "float32"]], "gradient_dtype": ""},
        "layers": (0, 3),
        "experts": 4,
        "epoch": 1,
        "sequence": 0,
        "epoch_bounds": (),
    }
    return NamespaceRow(**{**fields, **changes})  # type: ignore[arg-type]


def located(number: int = 0) -> Located:
    """Makes the location of a record in the `number`-th extent of volume 0."""
    return Located(Extent(0, number << 20, 1 << 20), Identity(1, number), 0xFFFF_FFFF_FFFF_FFFF - number)


def row_of(key: ExpertKey, first_step: int, number: int = 0) -> tuple[str, ExpertKey, Row]:
    """Makes a row of namespace `moe`, as a Change takes it."""
    return "moe", key, Row(first_step, located(number))


class CatalogContract(ABC):
    """Tests of any catalog: a test module subclasses it and defines `make`, and pytest runs them."""

    @abstractmethod
    def make(self, path: Path) -> Catalog:
        """Makes a new catalog of STORE_UUID, loaded. path: an empty directory."""

    @abstractmethod
    def reopened(self, catalog: Catalog, path: Path) -> Catalog:
        """Gives the catalog that the next process finds; `catalog` is not used any more."""

    def test_a_new_catalog_holds_nothing_but_the_uuid(self, tmp_path: Path) -> None:
        contents = self.make(tmp_path).load()
        assert contents == Contents(STORE_UUID)

    def test_everything_applied_is_there_after_opening_again(self, tmp_path: Path) -> None:
        catalog = self.make(tmp_path)
        volume = VolumeRow(index=1, uuid=b"v" * 16, size_bytes=1 << 40, written_bytes=4096)
        step = StepRow(step=7, sequence=3, note_slot=2, record_count=2, extra=b"\0x" * 100)
        catalog.apply(
            Change(
                put_namespaces=(namespace_row(epoch_bounds=((1, 5), (2, 9))),),
                put_rows=(row_of((3, 1), 7, 4), row_of((0, 2), 7, 5)),
                put_steps=(("moe", step),),
                put_volumes=(volume,),
            )
        )
        contents = self.reopened(catalog, tmp_path).load()
        assert contents.namespaces["moe"].namespace == namespace_row(epoch_bounds=((1, 5), (2, 9)))
        assert contents.namespaces["moe"].rows == {(3, 1): [Row(7, located(4))], (0, 2): [Row(7, located(5))]}
        assert contents.namespaces["moe"].steps == {7: step}
        assert contents.volumes == {1: volume}

    def test_rows_of_a_key_come_oldest_first(self, tmp_path: Path) -> None:
        catalog = self.make(tmp_path)
        steps = (300, -1, 2, 1 << 40, 255, 256, 0)
        catalog.apply(Change(put_namespaces=(namespace_row(),), put_rows=tuple(row_of((0, 0), step) for step in steps)))
        rows = self.reopened(catalog, tmp_path).load().namespaces["moe"].rows[0, 0]
        assert [row.first_step for row in rows] == sorted(steps)

    def test_drops_take_away_only_what_they_name(self, tmp_path: Path) -> None:
        catalog = self.make(tmp_path)
        steps = tuple(("moe", StepRow(step, step, step, 1, b"")) for step in (1, 2))
        rows = (row_of((0, 0), 1), row_of((0, 0), 2), row_of((0, 1), 1))
        catalog.apply(Change(put_namespaces=(namespace_row(),), put_rows=rows, put_steps=steps))
        catalog.apply(Change(drop_rows=(("moe", (0, 0), 1), ("moe", (0, 1), 1)), drop_steps=(("moe", 1),)))
        contents = self.reopened(catalog, tmp_path).load().namespaces["moe"]
        assert contents.rows == {(0, 0): [Row(2, located())]}
        assert list(contents.steps) == [2]

    def test_drops_apply_before_puts(self, tmp_path: Path) -> None:
        catalog = self.make(tmp_path)
        catalog.apply(Change(put_namespaces=(namespace_row(),), put_rows=(row_of((0, 0), 1, 1),)))
        catalog.apply(Change(drop_rows=(("moe", (0, 0), 1),), put_rows=(row_of((0, 0), 1, 2),)))
        assert self._rows(catalog, tmp_path) == {(0, 0): [Row(1, located(2))]}

    def test_a_namespace_is_dropped_with_all_that_is_in_it_and_no_other_is(self, tmp_path: Path) -> None:
        catalog = self.make(tmp_path)
        other = ("other", (0, 0), Row(1, located(9)))
        steps = (("moe", StepRow(1, 1, 0, 1, b"")), ("other", StepRow(1, 1, 1, 1, b"")))
        namespaces = (namespace_row(), namespace_row("other"))
        rows = (row_of((0, 0), 1), row_of((3, 3), 1), other)
        catalog.apply(Change(put_namespaces=namespaces, put_rows=rows, put_steps=steps))
        catalog.apply(Change(drop_namespaces=("moe",)))
        contents = self.reopened(catalog, tmp_path).load()
        assert list(contents.namespaces) == ["other"]
        assert contents.namespaces["other"].rows == {(0, 0): [Row(1, located(9))]}
        assert list(contents.namespaces["other"].steps) == [1]

    def test_a_namespace_can_be_dropped_and_made_anew_at_once(self, tmp_path: Path) -> None:
        catalog = self.make(tmp_path)
        catalog.apply(Change(put_namespaces=(namespace_row(),), put_rows=(row_of((0, 0), 1),)))
        anew = namespace_row(experts=9)
        catalog.apply(Change(drop_namespaces=("moe",), put_namespaces=(anew,), put_rows=(row_of((0, 8), 5),)))
        contents = self.reopened(catalog, tmp_path).load().namespaces["moe"]
        assert contents.namespace == anew
        assert list(contents.rows) == [(0, 8)]

    def test_putting_a_namespace_again_keeps_its_rows(self, tmp_path: Path) -> None:
        catalog = self.make(tmp_path)
        catalog.apply(Change(put_namespaces=(namespace_row(),), put_rows=(row_of((0, 0), 1),)))
        catalog.apply(Change(put_namespaces=(namespace_row(epoch=2, sequence=8, applies=5),)))
        contents = self.reopened(catalog, tmp_path).load().namespaces["moe"]
        assert contents.namespace == namespace_row(epoch=2, sequence=8, applies=5)
        assert list(contents.rows) == [(0, 0)]

    def test_what_load_returned_belongs_to_the_caller(self, tmp_path: Path) -> None:
        catalog = self.make(tmp_path)
        catalog.apply(Change(put_namespaces=(namespace_row(),), put_rows=(row_of((0, 0), 1),)))
        contents = catalog.load()
        contents.namespaces["moe"].rows.clear()
        contents.namespaces["moe"].namespace.schema.clear()
        again = catalog.load().namespaces["moe"]
        assert again.rows == {(0, 0): [Row(1, located())]}
        assert again.namespace == namespace_row()

    def test_a_reserved_change_is_applied(self, tmp_path: Path) -> None:
        catalog = self.make(tmp_path)
        catalog.apply(Change(put_namespaces=(namespace_row(),)))
        catalog.reserve(3)
        catalog.apply(Change(put_rows=tuple(row_of((0, expert), 1) for expert in range(3))))
        assert len(self._rows(catalog, tmp_path)) == 3

    def test_nothing_is_applied_between_reopen_and_load(self, tmp_path: Path) -> None:
        catalog = self.make(tmp_path)
        catalog.reopen()
        refused = raises_catalog_error(lambda: catalog.apply(Change(put_namespaces=(namespace_row(),))))
        assert "loaded" in refused
        assert catalog.load().namespaces == {}
        catalog.apply(Change(put_namespaces=(namespace_row(),)))
        assert list(catalog.load().namespaces) == ["moe"]

    def test_a_closed_catalog_refuses(self, tmp_path: Path) -> None:
        catalog = self.make(tmp_path)
        catalog.close()
        assert raises_catalog_error(catalog.load)

    def _rows(self, catalog: Catalog, path: Path) -> dict[ExpertKey, list[Row]]:
        return self.reopened(catalog, path).load().namespaces["moe"].rows


def raises_catalog_error(call: Callable[[], object]) -> str:
    """Gives the message of the CatalogError that `call` raises; fails if it raises none."""
    try:
        call()
    except CatalogError as error:
        return str(error)
    raise AssertionError("no CatalogError was raised")
