"""The cut of a commit: which records it publishes as they are, which it has to write first, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterable

from paramstore.core.apply_log import ApplyLog
from paramstore.core.residency import Working
from paramstore.engine.planner.leases import LeasePlanner
from paramstore.engine.planner.working_copies import WorkingPlanner
from paramstore.engine.tables.copies import Cut, WorkingCopy
from paramstore.engine.tables.moves import Outbox
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.requests import Urgency
from paramstore.storage.space.extents import Space


class CutPlanner:
    """Decides about the cut of a namespace; part of the planner, on the event-loop thread."""

    def __init__(
        self, space: Space, outbox: Outbox, working: WorkingPlanner, leases: LeasePlanner
    ) -> None:
        self._space = space
        self._outbox = outbox
        self._working = working
        self._leases = leases

    def begin(self, namespace: NamespaceState) -> Cut:
        """Fixes which records a commit publishes: all that have changed, as they are until the caller gives the turn back, before
        which it has `take`n every record of the cut. The commit has to write those that are not written.

        Raises VolumeError while a volume is fenced by a failed flush; nothing has changed then.
        """
        self._space.fences.check_provable()
        namespace.steps.sequence += 1
        records, namespace.steps.changed = namespace.steps.changed, []
        writing = namespace.writing
        log = writing.log.window(writing.applies) if namespace.is_exact else ApplyLog()
        cut = namespace.steps.cut = Cut(namespace.steps.sequence, writing.applies, records, len(records), log=log)
        return cut

    def take(self, namespace: NamespaceState, records: Iterable[WorkingCopy]) -> None:
        """Takes these of the cut's records into it: what is whole on a volume is kept there, the others are to be written."""
        cut = namespace.steps.cut
        assert cut is not None
        for working in records:
            found = working.uncommitted  # never a committed step's extent, which would be given back where the commit fails
            if cut.awaits(working) and found is not None and found.identity == working.identity:
                cut.keep(working, found)

    @staticmethod
    def await_written(cut: Cut, future: object) -> None:
        """Notes the commit's future, which is woken when all its writes have landed or one has failed."""
        cut.written = future

    def wake_waiting(self, namespace: NamespaceState) -> None:
        """Wakes those who wait for the commit under way, whose end may never come."""
        self._outbox.woken.extend(namespace.steps.cut_waiters)
        namespace.steps.cut_waiters.clear()

    def write(self, namespace: NamespaceState, working: WorkingCopy) -> bool:
        """Begins the write of a record that the cut waits for, or makes it urgent; where it has landed, does nothing. Returns False
        where it can be written only later."""
        if not namespace.steps.is_cut(working):
            return True  # it has landed meanwhile, and may be dirty with a later version by now
        if working.state is Working.DIRTY:
            return self._working.begin_write(namespace, working, Urgency.DEMAND)
        if working.state is not Working.WRITING:
            return False
        self._outbox.promoted.append(working)
        return True

    def settle(self, namespace: NamespaceState, records: Iterable[WorkingCopy], *, is_published: bool) -> None:
        """Lets go of these of the cut's records. If its step was published, its extents are the ledger's now; else the newest of
        them stay uncommitted. To be called for all of them, then `end`."""
        cut = namespace.steps.cut
        assert cut is not None
        for working in records:
            located, working.cut_record = working.cut_record, None
            if not is_published:  # a write that lands from now on is not the cut's any more
                cut.unwritten -= cut.awaits(working)
                namespace.steps.note_change(working)
            if located is None:
                self._working.wake(working)
                continue
            is_newest = working.uncommitted == located
            if is_published and is_newest:
                working.uncommitted = None
            elif not is_published and not is_newest:
                self._space.release(located.extent)

    def end(self, namespace: NamespaceState) -> None:
        """Ends the cut, of which everything is settled."""
        cut, namespace.steps.cut = namespace.steps.cut, None
        assert cut is not None
        self.wake_waiting(namespace)
        self._leases.pump(namespace)
