"""Catalog transactions, one at a time, and how each has ended.

The outcome of a transaction that raised is *unknown*: the catalog is reopened and read, and what it holds is what happened. If it
cannot be read either, the store accepts no more changes until a restart.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.runner import CATALOG_LANE, Runner, call
from paramstore.engine.transfers.scheduler import Transfer
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import CatalogError, ParamStoreError
from paramstore.storage.catalog.base import Catalog, Change, Contents
from paramstore.storage.catalog.publication import Publication

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Transactions:
    """Changes the catalog of an open store; nobody else does, except for the rows of volumes. Owns whether writes are accepted."""

    def __init__(
        self, transfers: Transfers, runner: Runner, *, catalog: Catalog, namespaces: Mapping[str, NamespaceState]
    ) -> None:
        self._transfers = transfers
        self._runner = runner
        self._catalog = catalog
        self._namespaces = namespaces
        self.stopped: str | None = None
        """Why no writes are accepted any more (the catalog could not be read back after a failure); None while they are."""
        self._planned_elsewhere: Counter[str] = Counter()
        """How many plans of each namespace, by name, another thread makes now."""
        self._room_rows = 0
        """Rows for which room was made after the last transaction: a commit of no more rows need not ask for room."""
        self._begun = 0
        """Number of transactions begun."""

    def check_accepting(self) -> None:
        if self.stopped is not None:
            raise CatalogError(f"this store accepts no writes: {self.stopped}; restart the daemon")

    async def reserve(self, row_count: int) -> None:
        """Makes room in the catalog for `row_count` rows of the next transaction. Raises CatalogError."""
        if row_count > self._room_rows:
            await self._runner.call(CATALOG_LANE, lambda: self._catalog.reserve(row_count))

    @contextmanager
    def planned_elsewhere(self, namespace: NamespaceState) -> Iterator[None]:
        """A context in which another thread reads the namespace's ledger, so that nothing may settle in it. See decision 30."""
        self._planned_elsewhere[namespace.name] += 1
        try:
            yield
        finally:
            self._planned_elsewhere[namespace.name] -= 1

    def settling_ledger(self, namespace: NamespaceState, publication: Publication) -> Iterator[None]:
        """Brings the ledger in line with a publication that has succeeded, in slices. See `Ledger.settling`."""
        assert not self._planned_elsewhere[namespace.name], f"{namespace.name!r} settles while another thread plans from its ledger"
        return namespace.steps.ledger.settling(publication)

    async def look(self, namespace: NamespaceState, read: Callable[[], T], *, room_of: Callable[[T], int]) -> tuple[T, bool]:
        """Runs `read`, of the namespace's ledger, on the catalog's thread. Returns what it found, and whether the catalog has room,
        or could get it, for as many kept rows as `room_of` says of that."""

        def run() -> tuple[T, bool]:
            found = read()
            try:
                self._catalog.reserve(1, kept_rows=room_of(found))
            except CatalogError:
                return found, False
            return found, True

        with self.planned_elsewhere(namespace):
            found: tuple[T, bool] = await self._runner.call(CATALOG_LANE, run)
        return found

    async def publish(
        self, namespace: NamespaceState, plan: Callable[[], Publication], *, room_rows: int = 0
    ) -> Publication:
        """Runs one transaction of what `plan` returns. The plan runs on the catalog's thread, since one of 15,000 changed records
        takes longer than the loop may be held. room_rows: rows that the next transaction will need. Raises CatalogError."""
        planned: list[Publication] = []

        def change() -> Change:
            planned.append(plan())
            return planned[0].change()

        with self.planned_elsewhere(namespace):
            await self._transact(change)
        if room_rows:
            self._make_room(room_rows)
        return planned[0]

    async def apply_change(self, change: Change) -> None:
        """Runs one transaction. If it fails, what the reopened catalog holds is the truth. Raises CatalogError."""
        await self._transact(lambda: change)

    async def _transact(self, plan: Callable[[], Change]) -> None:
        """Plans and applies the change, in one call on the catalog's thread."""
        self.check_accepting()
        planned: list[Change] = []
        room_before, self._room_rows = self._room_rows, 0
        self._begun += 1

        def run() -> None:
            change = plan()
            if change.row_count > room_before:
                self._catalog.reserve(change.row_count)
            planned.append(change)
            self._catalog.apply(change)

        try:
            await self._runner.call(CATALOG_LANE, run)
        except ParamStoreError as error:
            if not planned or not await self._happened(planned[0], error):
                raise  # nothing was begun, or it did not happen

    def _make_room(self, row_count: int) -> None:
        """Begins to make room for the next commit's rows, so that it need not ask. Nobody waits for it: the transaction before it
        has happened, whatever comes of this."""
        begun = self._begun

        def settle(transfer: Transfer) -> None:
            if transfer.error is not None:
                logger.warning("no room could be made in the catalog for the next commit: %s", transfer.error)
            elif self._begun == begun:  # no later transaction may have used it
                self._room_rows = row_count

        reserve = partial(self._catalog.reserve, row_count)
        self._runner.submit(Transfer(CATALOG_LANE, Urgency.WRITE_BACK, run=call, pieces=deque([reserve]), settle=settle))

    async def _happened(self, change: Change, error: ParamStoreError) -> bool:
        """Reads from disk whether `change` happened. Raises CatalogError, and stops all writes, if that fails too."""
        logger.error("a catalog transaction failed, reading it back: %s", error)

        def read_back() -> bool:
            self._catalog.reopen()
            return _is_in(change, self._catalog.load())

        try:
            return bool(await self._runner.call(CATALOG_LANE, read_back))
        except ParamStoreError as second:
            self._stop(f"the catalog failed ({error}) and could not be read back ({second})")
            raise CatalogError(f"the outcome of the transaction is unknown: {self.stopped}; restart the daemon") from error

    def _stop(self, reason: str) -> None:
        """Accepts no writes from here on: every namespace is broken, and whoever waits for a commit goes on."""
        self.stopped = reason
        with self._transfers.deciding() as planner:
            for namespace in self._namespaces.values():
                planner.mark_broken(namespace, f"{reason}; restart the daemon")
                planner.cuts.wake_waiting(namespace)


def _is_in(change: Change, contents: Contents) -> bool:
    """Whether the catalog holds `change`. Its rows of namespaces, steps and volumes tell: every change has a new one of them."""
    rows = {name: found.namespace for name, found in contents.namespaces.items()}
    if any(rows.get(row.name) != row for row in change.put_namespaces):
        return False
    steps = {name: found.steps for name, found in contents.namespaces.items()}
    are_steps_in = all(steps[name].get(row.step) == row for name, row in change.put_steps)
    are_steps_out = all(step not in steps[name] for name, step in change.drop_steps)
    return are_steps_in and are_steps_out and all(contents.volumes.get(row.index) == row for row in change.put_volumes)
