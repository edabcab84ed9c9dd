"""Every catalog against a dictionary: after any calls, faults and re-openings it holds all of each transaction, or none of it."""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent, Identity, Located
from paramstore.errors import CatalogError
from paramstore.storage.catalog.base import Catalog, Change, Contents, NamespaceRow, Row, StepRow, VolumeRow
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog
from paramstore.testing.catalogs import STORE_UUID, FaultyCatalog, MemoryCatalog, namespace_row
from paramstore_testkit.trials.state_machines import run_new

NAMES = ("moe", "other", "a" * 64)
PLACES = [Path("/dev/shm"), Path(tempfile.gettempdir())]
"""Where LMDB's file lies, the first that there is: what a flush does is no matter of the model."""
SMALL_MAP_BYTES = 256 << 10
NUMBER = st.integers(0, 3) | st.sampled_from([255, 256, (1 << 31) - 1, 1 << 32, (1 << 62) - 1])
KEY = st.tuples(st.integers(0, 2), st.integers(0, 3))
Table = dict[tuple[Any, ...], Any]


def table_of(contents: Contents) -> Table:
    """Everything that the catalog holds, one entry for each row of any kind."""
    table: Table = {("volume", index): volume for index, volume in contents.volumes.items()}
    for name, found in contents.namespaces.items():
        table["namespace", name] = found.namespace
        table.update({("step", name, step): row for step, row in found.steps.items()})
        for key, rows in found.rows.items():
            assert rows, f"{key} has an empty list of rows"
            assert [row.first_step for row in rows] == sorted({row.first_step for row in rows})
            table.update({("row", name, key, row.first_step): row.located for row in rows})
    return table


def applied(table: Table, change: Change) -> Table:
    """`table` after `change`: drops, then puts."""
    after = {entry: value for entry, value in table.items() if entry[0] == "volume" or entry[1] not in change.drop_namespaces}
    for name, key, first_step in change.drop_rows:
        after.pop(("row", name, key, first_step), None)
    for name, step in change.drop_steps:
        after.pop(("step", name, step), None)
    after.update({("namespace", row.name): row for row in change.put_namespaces})
    after.update({("row", name, key, row.first_step): row.located for name, key, row in change.put_rows})
    after.update({("step", name, row.step): row for name, row in change.put_steps})
    after.update({("volume", row.index): row for row in change.put_volumes})
    return after


class CatalogMachine(RuleBasedStateMachine):
    """`table` is what must be there; until the catalog was opened again after a failure, nobody may look or write."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Table = {}
        self.is_loaded = True
        self.numbers = itertools.count(1)
        self.faults: FaultyCatalog | None = None
        self.catalog = self.make()
        assert self.catalog.load() == Contents(STORE_UUID)

    def make(self) -> Catalog:
        return MemoryCatalog()

    def next_process(self) -> Catalog:
        """The catalog as whoever opens it next finds it; the one there is, is not used any more."""
        assert isinstance(self.catalog, MemoryCatalog)
        return self.catalog.crash()

    @initialize(names=st.sets(st.sampled_from(NAMES), max_size=3))
    def begin(self, names: set[str]) -> None:
        self._apply(Change(put_namespaces=tuple(namespace_row(name) for name in sorted(names))))

    # --- changes

    def _located(self) -> Located:
        number = next(self.numbers)
        return Located(Extent(number % 3, number << 20, 1 << 20), Identity(number, number * 7), (1 << 64) - number)

    def _present(self, kind: str, names: set[str]) -> list[tuple[Any, ...]]:
        return sorted((entry for entry in self.table if entry[0] == kind and entry[1] in names), key=repr)

    def _names(self) -> set[str]:
        return {entry[1] for entry in self.table if entry[0] == "namespace"}

    @precondition(lambda self: self.is_loaded)
    @rule(
        made=st.sets(st.sampled_from(NAMES), max_size=2), dropped=st.sets(st.sampled_from(NAMES), max_size=1),
        puts=st.lists(st.tuples(st.sampled_from(NAMES), KEY, NUMBER), max_size=5, unique=True),
        steps=st.lists(st.tuples(st.sampled_from(NAMES), NUMBER), max_size=3, unique=True),
        pick=st.integers(0, 7), volumes=st.sets(st.integers(0, 300), max_size=1),
        fault=st.sampled_from(["", "", "", "lost", "durable"]),
    )  # fmt: skip
    def apply(
        self, *, made: set[str], dropped: set[str], puts: list[tuple[str, ExpertKey, int]], steps: list[tuple[str, int]],
        pick: int, volumes: set[int], fault: str,
    ) -> None:  # fmt: skip
        """One transaction of everything at once: some drops of what is there, puts of what is new or is put again."""
        dropped &= self._names()
        names = (self._names() - dropped) | made
        kept = self._names() - dropped
        change = Change(
            put_namespaces=tuple(self._namespace(name) for name in sorted(made)),
            drop_namespaces=tuple(dropped),
            put_rows=tuple((name, key, Row(step, self._located())) for name, key, step in puts if name in names),
            drop_rows=tuple((name, key, step) for _, name, key, step in self._present("row", kept)[pick::5]),
            put_steps=tuple((name, self._step(step)) for name, step in steps if name in names),
            drop_steps=tuple((name, step) for _, name, step in self._present("step", kept)[pick::5]),
            put_volumes=tuple(VolumeRow(index, bytes([index % 256]) * 16, next(self.numbers) << 40, 1 << 33) for index in volumes),
        )
        self._apply(change, fault)

    apply_more = apply

    def _namespace(self, name: str) -> NamespaceRow:
        number = next(self.numbers)
        return namespace_row(name, epoch=number, sequence=number * 3, epoch_bounds=((1, 5), (number, 9)), applies=number)

    def _step(self, step: int) -> StepRow:
        number = next(self.numbers)
        return StepRow(step, number, number % 64, number, bytes([number % 256]) * (number % 40), number, number % 3 == 0)

    def _apply(self, change: Change, fault: str = "") -> None:
        after = applied(self.table, change)
        if not fault:
            self.catalog.apply(copy.deepcopy(change))
            self.table = after
            return
        self.fail_once(fault)
        with pytest.raises(CatalogError):
            self.catalog.apply(change)
        self.is_loaded = False
        if fault == "durable":
            self.table = after

    def fail_once(self, fault: str) -> None:
        """The next transaction is refused, `lost`, or done and said to have failed, `durable`."""
        self.faults = self.faults or FaultyCatalog(self.catalog, fail_at=0, outcome="lost")
        self.catalog = self.faults
        self.faults.fail_next("durable" if fault == "durable" else "lost")

    # --- the rest

    @precondition(lambda self: not self.is_loaded)
    @rule()
    def apply_while_nothing_is_known(self) -> None:
        with pytest.raises(CatalogError):
            self.catalog.apply(Change(put_namespaces=(namespace_row("moe", epoch=999),)))

    @rule(row_count=st.sampled_from([0, 1, 1000]))
    def reserve(self, row_count: int) -> None:
        self.catalog.reserve(row_count)

    @rule()
    def reopen(self) -> None:
        self.catalog.reopen()
        self.is_loaded = False
        self._load()

    def _load(self) -> None:
        found = self.catalog.load()
        assert found.store_uuid == STORE_UUID
        assert table_of(found) == self.table
        self.is_loaded = True

    @rule(is_closed=st.booleans())
    def end_the_process(self, is_closed: bool) -> None:
        if is_closed:
            self.catalog.close()
            with pytest.raises(CatalogError):
                self.catalog.load()
        if self.faults is not None:
            self.catalog = self.faults.inner
        self.catalog, self.faults = self.next_process(), None
        self._load()

    @precondition(lambda self: self.is_loaded)
    @rule()
    def change_what_load_gave(self) -> None:
        """It is the caller's own."""
        contents = self.catalog.load()
        contents.volumes.clear()
        for found in contents.namespaces.values():
            found.rows.clear()
            found.steps.clear()
            found.namespace.schema.clear()

    @invariant()
    def the_catalog_holds_what_was_applied_and_nothing_else(self) -> None:
        if self.is_loaded:
            assert table_of(self.catalog.load()) == self.table


class FailingEnvironment:
    """An LMDB environment whose next transaction fails at its end, before or after it was committed."""

    def __init__(self, inner: lmdb.Environment, *, is_durable: bool) -> None:
        self._inner = inner
        self._is_durable = is_durable

    def begin(self, write: bool = False) -> AbstractContextManager[lmdb.Transaction]:
        return self._begin() if write else self._inner.begin()

    @contextmanager
    def _begin(self) -> Iterator[lmdb.Transaction]:
        with self._inner.begin(write=True) as transaction:
            yield transaction
            if not self._is_durable:
                raise lmdb.Error("the device failed")
        raise lmdb.Error("the device failed, or so it says")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class LmdbMachine(CatalogMachine):
    """The same of the file, whose transactions fail inside LMDB; now and then behind a FaultyCatalog instead."""

    def make(self) -> Catalog:
        self.directory = tempfile.TemporaryDirectory(dir=next(place for place in PLACES if place.is_dir()))
        self.path = Path(self.directory.name) / "catalog"
        return LmdbCatalog(self.path, store_uuid=STORE_UUID, map_bytes=SMALL_MAP_BYTES)

    def next_process(self) -> Catalog:
        self.catalog.close()
        return LmdbCatalog(self.path, map_bytes=SMALL_MAP_BYTES)

    def fail_once(self, fault: str) -> None:
        if next(self.numbers) % 4 == 0 or not isinstance(self.catalog, LmdbCatalog):
            super().fail_once(fault)
        else:
            self.catalog._environment = FailingEnvironment(self.catalog._environment, is_durable=fault == "durable")

    def teardown(self) -> None:
        self.catalog.close()
        self.directory.cleanup()


@pytest.mark.slow
@pytest.mark.parametrize("machine", [CatalogMachine, LmdbMachine])
def test_a_catalog_holds_all_of_every_transaction_and_nothing_else(
    machine: type[CatalogMachine], run_fixed: Callable[..., None]
) -> None:
    run_fixed(machine)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [CatalogMachine, LmdbMachine])
def test_the_same_in_lives_that_no_run_had_before(machine: type[CatalogMachine], capsys: pytest.CaptureFixture[str]) -> None:
    run_new(machine, capsys)
