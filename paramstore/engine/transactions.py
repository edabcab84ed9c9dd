"""Catalog transactions, one at a time: how each ends, and what it means if nobody can say.

A transaction that raised is *unknown*: the catalog is reopened and read, and what it says is what happened. If it cannot be
read either, the store accepts no more changes until a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from paramstore.engine.namespace import NamespaceState
from paramstore.engine.planner import Planner
from paramstore.engine.runner import CATALOG_LANE, Runner
from paramstore.engine.transfers import Transfers
from paramstore.errors import CatalogError, ParamStoreError
from paramstore.storage.catalog import Catalog, Change, Contents
from paramstore.storage.publication import Publication

logger = logging.getLogger(__name__)


class Transactions:
    """The only one who changes the catalog of an open store, but for the volumes' sizes. Owner of whether anything may."""

    def __init__(
        self, planner: Planner, transfers: Transfers, runner: Runner, *, catalog: Catalog, namespaces: Mapping[str, NamespaceState]
    ) -> None:
        self._planner = planner
        self._transfers = transfers
        self._runner = runner
        self._catalog = catalog
        self._namespaces = namespaces
        self.stopped: str | None = None
        """Why nothing durable is accepted any more: the catalog could not be read back after a failure."""
        self._room_rows = 0
        """For how many rows the catalog has had room since the last transaction: a commit of no more need not ask."""

    def check_accepting(self) -> None:
        if self.stopped is not None:
            raise CatalogError(f"this store accepts no writes: {self.stopped}; restart the daemon")

    async def reserve(self, row_count: int) -> None:
        """On return the next transaction has room for `row_count` rows. Raises CatalogError."""
        if row_count > self._room_rows:
            await self._runner.call(CATALOG_LANE, lambda: self._catalog.reserve(row_count))

    async def publish(self, plan: Callable[[], Publication], *, room_rows: int = 0) -> Publication:
        """One transaction of what `plan` gives, which runs on the catalog's thread: a plan of 15,000 changed records takes longer
        than the loop may be held. room_rows: what the next one will need. Raises CatalogError."""
        planned: list[Publication] = []

        def change() -> Change:
            planned.append(plan())
            return planned[0].change()

        await self._transact(change, room_rows=room_rows)
        return planned[0]

    async def apply_change(self, change: Change) -> None:
        """One transaction. If it raises, what the reopened catalog holds is the truth. Raises CatalogError."""
        await self._transact(lambda: change)

    async def _transact(self, plan: Callable[[], Change], *, room_rows: int = 0) -> None:
        """One transaction of what `plan` gives; both on the catalog's thread, in one go, and room for the next `room_rows`."""
        self.check_accepting()
        planned: list[Change] = []

        room_before, self._room_rows = self._room_rows, 0

        def run() -> int:
            change = plan()
            if change.row_count > room_before:
                self._catalog.reserve(change.row_count)
            planned.append(change)
            self._catalog.apply(change)
            return self._make_room(room_rows)

        try:
            self._room_rows = await self._runner.call(CATALOG_LANE, run)
        except ParamStoreError as error:
            if not planned or not await self._happened(planned[0], error):
                raise  # nothing was begun, or it did not happen

    def _make_room(self, row_count: int) -> int:
        """Ahead of the next commit, so that it need not ask. Gives for how many rows; 0 if that is for the next to find out."""
        if not row_count:
            return 0
        try:
            self._catalog.reserve(row_count)
        except Exception as error:  # noqa: BLE001 - the transaction before it has happened, whatever this is
            logger.warning("no room could be made in the catalog for the next commit: %s", error)
            return 0
        return row_count

    async def _happened(self, change: Change, error: ParamStoreError) -> bool:
        """Resolves an unknown outcome from disk. Raises CatalogError, and stops all writes, if that fails too."""
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
        """Nothing durable is accepted from here on: every writer is told, whoever waits for a commit goes on."""
        self.stopped = reason
        for namespace in self._namespaces.values():
            self._planner.mark_broken(namespace, f"{reason}; restart the daemon")
            self._planner.outbox.woken.extend(namespace.cut_waiters)
            namespace.cut_waiters.clear()
        self._transfers.drain()


def _is_in(change: Change, contents: Contents) -> bool:
    """Whether the catalog holds what `change` put there. The rows of namespaces and steps tell: one of them is new each time."""
    rows = {name: found.namespace for name, found in contents.namespaces.items()}
    if any(rows.get(row.name) != row for row in change.put_namespaces):
        return False
    steps = {name: found.steps for name, found in contents.namespaces.items()}
    are_steps_in = all(steps[name].get(row.step) == row for name, row in change.put_steps)
    are_steps_out = all(step not in steps[name] for name, step in change.drop_steps)
    return are_steps_in and are_steps_out and all(contents.volumes.get(row.index) == row for row in change.put_volumes)
