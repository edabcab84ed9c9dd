"""The cleaner: keeps slots clean, so that eviction never writes; and write-back and eviction on request.

It writes what eviction will need soon and no more, because a record written early must be written again after its next update.
Above the limit on dirty bytes it writes early all the same, so that a commit never waits for more than the limit and what is
under way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

from paramstore.core.key import ExpertKey
from paramstore.core.residency import Working
from paramstore.engine.planner.apply_order import slots_to_clean
from paramstore.engine.planner.working_copies import WRITE_TRIES, failed_twice
from paramstore.engine.records.access import Access
from paramstore.engine.tables.copies import WorkingCopy
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.runner import BACKGROUND_LANE
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import CapacityError, StepFailed


class Cleaner:
    """Writes dirty records: ahead of eviction, for a cut, or because somebody asked."""

    def __init__(self, transfers: Transfers, access: Access, *, find_room: Callable[[NamespaceState], Awaitable[bool]]) -> None:
        """find_room: the last resort of a call that lacks space; whether some is free now, or comes free."""
        self._transfers = transfers
        self._access = access
        self._find_room = find_room

    def clean_ahead(self, namespace: NamespaceState, wanted_slots: int, *, spared: Collection[ExpertKey] = ()) -> None:
        """Starts as many writes as are needed until `wanted_slots` slots are free, clean or being written, and until the dirty
        records that nobody writes are below the limit. spared: keys that whoever wants the slots may not evict."""
        arena = namespace.memory.working
        with self._transfers.deciding() as planner:
            planner.working.clean(namespace, slots_to_clean(namespace, wanted_slots, spared), Urgency.WRITE_BACK, spared=spared)
            if arena.dirty_limit_bytes is not None:
                above = len(namespace.residency.in_state[Working.DIRTY]) - arena.dirty_limit_bytes // namespace.schema.record_bytes
                planner.working.clean_settled(namespace, max(0, above))

    async def write(self, namespace: NamespaceState, key: ExpertKey, urgency: Urgency) -> bool:
        """Writes `key` back: on return it is not dirty. True if this call wrote it, or joined a write that did. A write that failed
        is repeated once, on another extent, whoever began it; raises what the second one met."""
        working = namespace.residency.working[key]
        identity = working.identity
        is_written = False
        while working.identity == identity and working.state in (Working.DIRTY, Working.WRITING, Working.UPDATING):
            if working.is_orphan:
                raise StepFailed(f"{key} of {namespace.name!r} was discarded by a rollback")
            if working.state is Working.DIRTY:
                if is_written and working.write_failures.tries % WRITE_TRIES == 0:
                    raise failed_twice(namespace, working, self._transfers.space.fences)
                with self._transfers.deciding() as planner:
                    has_begun = planner.working.begin_write(namespace, working, urgency)
                if not has_begun:
                    await self._until_written(namespace, working)
                    continue
            elif working.state is Working.WRITING:
                self._transfers.promote(working, urgency)
            is_written = working.state is Working.WRITING or is_written
            await self._access.changed(namespace, working)
        return is_written

    async def _until_written(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        """Waits until another write of the namespace is over, which may have freed an extent, or until space may have come free.
        Raises CapacityError if neither is to be expected."""
        writing = next(iter(namespace.residency.in_state[Working.WRITING]), None)
        if writing is not None:
            await self._access.changed(namespace, writing)
        elif not await self.until_space(namespace, for_cut=namespace.steps.is_cut(working)):
            record_bytes = namespace.schema.record_bytes
            raise CapacityError(
                self._transfers.space.fences.first(
                    f"no extent of {record_bytes} bytes is free for namespace {namespace.name!r}: add a volume (--add-volume)"
                )
            )

    async def until_settled(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        """Waits until the write under way of a record that a cut waits for, if there is one, is over. Raises WaitTimeout."""
        while working.state is Working.WRITING and namespace.steps.is_cut(working):
            self._transfers.promote(working, Urgency.DEMAND)  # it may be another one than the commit began
            await self._access.changed(namespace, working)

    async def until_space(self, namespace: NamespaceState, *, for_cut: bool = False) -> bool:
        """Waits until space that is about to come free (a commit's, a zero-fill's, that of reads and writes under way, what older
        steps have borrowed) may have come: then True. False, at once, if there is none: waiting would be for nothing.

        for_cut: the commit under way waits for the caller. Raises WaitTimeout, StepFailed on a broken namespace.
        """
        if namespace.steps.cut is not None and not for_cut:
            await self._access.cut_over(namespace)
        elif self._transfers.space.is_prefilling:  # it takes no other range while somebody is short of one
            await self._transfers.runner.behind(BACKGROUND_LANE)
        elif self._transfers.is_space_returning:
            await self._access.space_freed()
        else:
            return await self._find_room(namespace)
        return True

    async def write_back(self, namespace: NamespaceState, keys: Sequence[ExpertKey] | None) -> dict[str, int]:
        """Writes what is dirty among `keys` (None: all). Returns the records and bytes written."""
        dirty = [working for working in self._chosen(namespace, keys) if working.state in (Working.DIRTY, Working.WRITING)]
        with self._transfers.deciding() as planner:
            for working in dirty:  # all are queued first, so that the volumes see them at once
                if working.state is Working.DIRTY:
                    planner.working.begin_write(namespace, working, Urgency.WRITE_BACK)
        written = 0
        for working in dirty:
            written += 1
            await self.write(namespace, working.key, Urgency.WRITE_BACK)
        return {"written": written, "bytes": written * namespace.schema.record_bytes}

    @staticmethod
    def _chosen(namespace: NamespaceState, keys: Sequence[ExpertKey] | None) -> Iterable[WorkingCopy]:
        if keys is None:
            return list(namespace.residency.resident.values())
        namespace.keys.check(keys, namespace=namespace.name)
        return [namespace.residency.working[key] for key in dict.fromkeys(keys)]

    async def evict(self, namespace: NamespaceState, keys: Sequence[ExpertKey] | None, part: str | None) -> dict[str, object]:
        """Evicts `keys` (None: all) from host memory, dirty ones after writing them. part: "optim", "param" or None for both.
        Returns how many copies were evicted, and the keys that had one in use."""
        chosen = list(namespace.keys) if keys is None else list(dict.fromkeys(keys))
        namespace.keys.check(chosen, namespace=namespace.name)
        if part is not None:
            namespace.schema.part(part)
        working = part != "param" and namespace.is_trainable()
        if working:
            await self.write_back(namespace, keys)
        with self._transfers.deciding() as planner:
            evicted, skipped = planner.evict(namespace, chosen, working=working, param=part != "optim")
        return {"evicted": evicted, "skipped": [list(key) for key in skipped]}
