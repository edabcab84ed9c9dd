"""Reads whole records as a view sees them, that is with their missed steps made.

The steps are made in the reader's own memory; the header there stays that of the record as it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.optimizers import Options
from paramstore.engine.planner.permission import check_unclaimed
from paramstore.engine.records.access import Access
from paramstore.engine.tables.copies import WorkingCopy
from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore.engine.transfers.advance import advance, count_advance
from paramstore.engine.transfers.runner import CPU_LANE, Runner
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import StepDropped, StepFailed


class Reading:
    """Reads single records; part of the store."""

    def __init__(self, transfers: Transfers, access: Access, runner: Runner) -> None:
        self._transfers = transfers
        self._access = access
        self._runner = runner

    async def read(self, view: View, key: ExpertKey, target: memoryview) -> Identity:
        """Copies the stored part's image, as `view` sees it, to `target` (record_bytes, page-aligned). Raises CorruptRecord;
        StepOutOfOrder for a writer whose open apply is under way."""
        namespace = view.namespace
        if view.is_writer:
            check_unclaimed(namespace, what="read")
        view.check_open()
        namespace.keys.check([key], namespace=namespace.name)
        if view.is_writer:
            async with namespace.writing.turn:
                view.check_open()  # another writer may have fenced it and rolled back while it waited
                return await self._read_working(namespace, key, target)
        identity, located = view.locate(key)
        if identity is None or located is None:
            raise StepDropped(f"{key} of {namespace.name!r} has no record at step {view.step}")
        missed = view.log.missed(after=located.identity.version, until=identity.version) if namespace.is_exact else ()
        header = await self._transfers.read_into(namespace, key, located, target)
        await self._make_missed(namespace, key, target, missed, header.optimizer_step)
        return identity

    async def _read_working(self, namespace: NamespaceState, key: ExpertKey, target: memoryview) -> Identity:
        working = namespace.residency.working[key]
        if working.identity is None:
            raise StepFailed(f"{key} of {namespace.name!r} has no value yet: call initialize")
        if namespace.is_exact and namespace.writing.broken is not None and working.identity != working.target:
            # its gradient was not applied: a step without it would be taken for the one that has it
            raise StepFailed(f"{key} of {namespace.name!r}: {namespace.writing.broken}; rollback() is the way on")
        identity, log = working.identity, namespace.writing.log
        applies = min(namespace.writing.applies, log.last)  # an open apply that was given up counts, and is in no log
        found = namespace.locate(key)
        if isinstance(found, WorkingCopy):
            optimizer_step = await self._copy_held(namespace, key, target)
        elif found is None or found.identity != identity:  # a failed update has torn the newest bytes
            raise StepFailed(f"{key} of {namespace.name!r}: {namespace.writing.broken}; rollback() is the way on")
        else:
            optimizer_step = (await self._transfers.read_into(namespace, key, found, target)).optimizer_step
        if not namespace.is_exact or identity.version >= applies:
            return identity
        await self._make_missed(namespace, key, target, log.missed(after=identity.version, until=applies), optimizer_step)
        return Identity(log.epoch_of(applies), applies)

    async def _copy_held(self, namespace: NamespaceState, key: ExpertKey, target: memoryview) -> int:
        """Copies the working slot's image to `target`; returns the record's optimizer step."""
        held = await self._access.hold(namespace, key)
        try:
            assert held.slot is not None
            image, optimizer_step = namespace.memory.working.view(held.slot), held.optimizer_step
            await self._runner.call(CPU_LANE, lambda: target.__setitem__(slice(None), image))
        finally:
            with self._transfers.deciding() as planner:
                planner.working.unhold(namespace, held)
                planner.after_working(namespace, held)
        return optimizer_step

    async def _make_missed(
        self, namespace: NamespaceState, key: ExpertKey, image: memoryview, missed: Sequence[Options], optimizer_step: int
    ) -> None:
        if not missed:
            return
        job = partial(advance, namespace.schema, image, key=key, missed=missed, optimizer_step=optimizer_step)
        await self._runner.call(CPU_LANE, job)
        count_advance(namespace, len(missed))
