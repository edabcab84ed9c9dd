"""Bugs that a test plants in a daemon of its own, to show that it would find them. Each breaks one promise; its docstring says how.

`plant` changes the process that calls it, for good: call it in a child that serves one test's store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paramstore.core.key import ExpertKey
from paramstore.core.location import Located
from paramstore.daemon.peer import Peer
from paramstore.engine.capacity.upload_budget import UploadBudget
from paramstore.engine.steps.history import History
from paramstore.engine.steps.transactions import Transactions
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.storage.catalog.base import StepRow
from paramstore.storage.catalog.ledger import Ledger
from paramstore.storage.catalog.publication import Publication

PUBLISH_DELAY_S = 0.02


def plant(name: str) -> None:
    """Plants the bug of that name in this process."""
    BUGS[name]()


def acknowledge_early() -> None:
    """A commit is acknowledged before its catalog transaction, which follows a moment later."""
    publish = Transactions.publish
    late: set[asyncio.Task[None]] = set()

    async def publish_late(
        self: Transactions, namespace: NamespaceState, plan: Callable[[], Publication], *, room_rows: int = 0
    ) -> Publication:
        planned = plan()
        if not planned.put_steps:
            return await publish(self, namespace, lambda: planned, room_rows=room_rows)

        change = planned.change()  # whoever settles empties what it is made of

        async def publish_now() -> None:
            await asyncio.sleep(PUBLISH_DELAY_S)
            await self.apply_change(change)

        late.add(asyncio.get_running_loop().create_task(publish_now()))
        return planned

    replace_in(Transactions, publish=publish_late)


def lose_second_record() -> None:
    """A commit of two records or more publishes all but the second of them."""
    plan_publish = Ledger.plan_publish

    def plan(
        self: Ledger, step_row: StepRow, changed: Mapping[ExpertKey, Located], held_steps: Iterable[int]
    ) -> Publication:
        later = step_row.sequence > 1  # a first commit that lacks a record would be too easy to notice
        kept = {key: located for number, (key, located) in enumerate(changed.items()) if number != 1 or not later}
        return plan_publish(self, step_row, kept, held_steps)

    replace_in(Ledger, plan_publish=plan)


def keep_dead_updates() -> None:
    """A new writer does not begin at the committed step, but where the one before it stopped."""

    async def stay(self: History, namespace: NamespaceState, *, at: int | None) -> None:
        if namespace.steps.committed_step is None or at is not None:
            await reopen(self, namespace, at=at)

    reopen = History.reopen
    replace_in(History, reopen=stay)


def free_on_hangup() -> None:
    """Leases end with the connection, though the process may still read what it leased."""
    replace_in(Peer, is_watched=property(lambda self: False))


def forget_process() -> None:
    """The end of a client's process goes unnoticed."""
    replace_in(Peer, _ended=Peer.close)


def keep_uploads() -> None:
    """Upload areas of sessions that ended count for ever."""
    replace_in(UploadBudget, drop=lambda self, client: None)


def leak_descriptor() -> None:
    """The descriptor of a client's process stays open after its session."""

    def forget(self: Any) -> None:
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = None

    replace_in(Peer, close=forget)


BUGS: Mapping[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        acknowledge_early, lose_second_record, keep_dead_updates, free_on_hangup, forget_process, keep_uploads, leak_descriptor,
    )
}  # fmt: skip


def replace_in(owner: object, **replacements: Any) -> None:
    """Replaces these attributes of `owner`, which must have them."""
    for name, replacement in replacements.items():
        assert name in vars(owner), f"{owner} has no {name}: this bug is none any more"
        setattr(owner, name, replacement)
