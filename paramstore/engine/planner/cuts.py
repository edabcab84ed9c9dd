"""The cut of a commit: which records it publishes as they are, which it has to write first, and what becomes of them."""

from __future__ import annotations

from paramstore.core.apply_log import ApplyLog
from paramstore.core.key import ExpertKey
from paramstore.core.residency import Working
from paramstore.engine.planner.leases import LeasePlanner
from paramstore.engine.planner.param_copies import CopyPlanner
from paramstore.engine.planner.working_copies import WorkingPlanner
from paramstore.engine.tables.copies import Cut
from paramstore.engine.tables.moves import Outbox
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.requests import Urgency
from paramstore.storage.space.extents import Space


class CutPlanner:
    """Decides about the cut of a namespace; part of the planner, on the event-loop thread."""

    def __init__(
        self, space: Space, outbox: Outbox, copies: CopyPlanner, working: WorkingPlanner, leases: LeasePlanner
    ) -> None:
        self._space = space
        self._outbox = outbox
        self._copies = copies
        self._working = working
        self._leases = leases

    def cut(self, namespace: NamespaceState) -> Cut:
        """Fixes what a commit publishes: every changed record as it is now. The commit has to write those that are not written.

        Raises VolumeError while a volume is fenced by a failed flush; nothing has changed then.
        """
        self._space.fences.check_provable()
        namespace.sequence += 1
        keys = frozenset(namespace.changed)
        located, unwritten = {}, set()
        for key in keys:
            working = namespace.working[key]
            found = working.uncommitted  # never a committed step's extent, which would be given back where the commit fails
            if found is not None and found.identity == working.identity:
                located[key] = found
                self._space.pin(found.extent)
            else:
                unwritten.add(key)
        namespace.changed = set()
        log = namespace.log.window(namespace.applies) if namespace.is_exact else ApplyLog()
        cut = Cut(namespace.sequence, namespace.applies, keys, unwritten, located, log)
        namespace.cut = cut
        return cut

    @staticmethod
    def await_written(cut: Cut, future: object) -> None:
        """Notes the commit's future, which is woken when all its writes have landed or one has failed."""
        cut.written = future

    def wake_waiting(self, namespace: NamespaceState) -> None:
        """Wakes those who wait for the commit under way, whose end may never come."""
        self._outbox.woken.extend(namespace.cut_waiters)
        namespace.cut_waiters.clear()

    def write(self, namespace: NamespaceState, key: ExpertKey) -> None:
        """Begins the write of a record that the cut waits for, or makes it urgent; where it has landed, does nothing."""
        cut, working = namespace.cut, namespace.working[key]
        if cut is None or key not in cut.unwritten:
            return  # it has landed meanwhile, and may be dirty with a later version by now
        if working.state is Working.DIRTY:
            self._working.begin_write(namespace, working, Urgency.DEMAND)
        elif working.state is Working.WRITING:
            self._outbox.promoted.append(working)

    def settle(self, namespace: NamespaceState, *, is_published: bool) -> None:
        """Ends the cut. If its step was published, its extents are the ledger's now; else the newest of them stay uncommitted."""
        cut, namespace.cut = namespace.cut, None
        assert cut is not None
        for key, located in cut.located.items():
            self._space.unpin(located.extent)
            working = namespace.working[key]
            is_newest = working.uncommitted == located
            if is_published and is_newest:
                working.uncommitted = None
            elif not is_published and not is_newest:
                self._space.release(located.extent)
        for key in cut.keys:
            if key in cut.unwritten:
                self._working.wake(namespace.working[key])
        if not is_published:
            namespace.changed |= cut.keys
        self.wake_waiting(namespace)
        if any(view.step is not None for view in namespace.views):  # copies that only the writer saw have retired already
            self._copies.retire_unseen(namespace)
        self._leases.pump(namespace)
