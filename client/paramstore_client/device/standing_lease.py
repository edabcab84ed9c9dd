"""The lease of one visit of slots on the host: it ends the visit, and the leases below it stand.

Where it is dropped no code of Python runs, in which an interrupt would be lost: who owns the visits is left word of it.
What was used must have been held all the time: where another thread has closed the namespace meanwhile, its slots may have got
others' bytes, and what was computed with them is refused.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.policy.slot_plan import SlotPlan
from paramstore.policy.slot_visit import Held, SlotVisit
from paramstore_client.device.visit_lease import VisitLease
from paramstore_client.source import HostLease

_log = logging.getLogger(__name__)


class VisitOwner(Protocol):
    """Who decides visits, and has the leases that stand: `HostSlots`."""

    def begin_visit(self, plan: SlotPlan, visit: SlotVisit, lease: StandingLease) -> LeaseEnd:
        """Notes that the visit has an owner, who ends it, unless it is gone before."""
        ...

    def end_visit(self, plan: SlotPlan, visit: SlotVisit) -> None:
        """Ends a visit; a second call does nothing."""
        ...

    def lease_of(self, held: Held) -> HostLease:
        """The lease that stands for `held`, once it has come. Raises what its load raises, LeaseError where it is gone."""
        ...

    def have_come(self, asked: Sequence[Held]) -> list[Held]:
        """Those whose leases have an outcome. Where none has, as far as was heard, listens once."""
        ...

    def let_in(self, plan: SlotPlan, visit: SlotVisit, *, view: int, timeout_s: float | None, due: object = None) -> None:
        """Begins to load as many keys that pass by as there are slots for. due: the key that is used next."""
        ...

    def let_out(self, plan: SlotPlan, visit: SlotVisit, held: Held, *, view: int, timeout_s: float | None) -> None:
        """Gives back the slot of what has passed by, and lets the next ones in."""
        ...


class LeaseEnd(weakref.ref["StandingLease"]):
    """What is left of a lease that was dropped: its visit, and the leases that have given their tensors, but for those that have
    passed by; none once it was released."""

    __slots__ = ("plan", "used", "visit")

    plan: SlotPlan
    visit: SlotVisit
    used: dict[ExpertKey, HostLease]

    def leaves_slots(self) -> bool:
        """Whether nobody has tensors either. These may live on without the lease: giving their slots away would change their bytes
        under the caller's hands."""
        if self.used:
            _log.warning("a lease of %d keys was dropped without release(): its slots stay taken", len(self.used))
        return not self.used


class StandingLease(VisitLease):
    """The right to the bytes of one visit's keys. Its release ends the visit; the leases below stand. Asking for a key whose bytes
    are on their way waits for them. The end of its `with` raises LeaseError where what was used was released meanwhile."""

    __slots__ = ("__weakref__", "_end", "_owner", "_plan")

    def __init__(
        self, owner: VisitOwner, plan: SlotPlan, visit: SlotVisit, *, view: int, timeout_s: float | None = None
    ) -> None:
        self._owner = owner
        self._plan = plan
        super().__init__(visit, view=view, timeout_s=timeout_s)
        self._end = owner.begin_visit(plan, visit, self)  # last: from here on its end is this object's affair

    def __getitem__(self, key: ExpertKey, /) -> Mapping[str, Tensor]:
        lease = self._end.used[key] = self._owner.lease_of(self._held(key))
        return lease[key]

    def in_turn(self) -> Iterator[ExpertKey]:
        """Yields each key once, those that are there first, so that others may come meanwhile; waits where none is. Raises what a
        load raises."""
        owner, visit = self._owner, self._visit
        there = set(owner.have_come(visit.held))
        standing = deque(held for held in visit.held if held in there)
        coming = [held for held in visit.held if held not in there]
        while visit.waiting or visit.through or standing or coming:
            self._check_held("a layer's keys")
            self._let_in()
            under_way = [*visit.through, *coming]
            come = next(iter(owner.have_come(under_way)), None)
            held = come or (standing.popleft() if standing else under_way[0])
            owner.lease_of(held)
            if held in visit.through:
                self._by_key = None
                yield held.key  # type: ignore[misc]  # the names are keys here
                self._let_out(held)
                self._by_key = None
            else:
                coming = [other for other in coming if other is not held]
                yield held.key  # type: ignore[misc]

    def identity(self, key: ExpertKey, /) -> Identity:
        """Epoch and version of the bytes of `key`."""
        return self._owner.lease_of(self._held(key)).identity(key)

    def wait(self) -> None:
        """Returns once the bytes of all keys are there. Raises what a load raises."""
        for held in self._visit.held:
            self._owner.lease_of(held)

    def release(self) -> None:
        self._end.used = {}  # nobody uses them any more: cut off here, the visit is abandoned with this object
        self._owner.end_visit(self._plan, self._visit)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                for key, lease in self._end.used.items():
                    if lease.is_released:
                        lease[key]  # raises
        finally:
            self.release()

    def _let_in(self, due: ExpertKey | None = None) -> None:
        self._owner.let_in(self._plan, self._visit, view=self._view, timeout_s=self._timeout_s, due=due)

    def _let_out(self, held: Held) -> None:
        if (lease := self._end.used.pop(held.key, None)) is not None:  # type: ignore[call-overload]  # the names are keys here
            lease[held.key]  # raises where it was released meanwhile
        self._owner.let_out(self._plan, self._visit, held, view=self._view, timeout_s=self._timeout_s)
