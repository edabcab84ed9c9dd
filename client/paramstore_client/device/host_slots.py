"""Slots on the host: a slot is a lease that stands across visits, so that a hit copies nothing and asks nobody.

- A standing lease is given back when its key is evicted, when the view changes (at the next visit), when others lack its slot,
  when the session ends, and with its owner.
- What stands is within what was promised or lent (`Loans`): nobody else's lease ever waits for it.
- A visit that finds all its keys reads a table and sends nothing. What was used meanwhile is told with the next miss. So a reader
  whose step was dropped hears of it then, not before: what stands keeps its bytes.
- A visit of more keys than may stand runs the rest through a few slots, each given back once it was used (`in_turn`).
- An interrupt anywhere inside loses no lease: what was under decision is given back at the next visit.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.schema import Schema
from paramstore.errors import LeaseError, ParamStoreError, StepMismatch
from paramstore.policy.make import make_slot_policy
from paramstore.policy.slot_plan import SlotPlan, most_for_one
from paramstore.policy.slot_visit import Held, SlotCounts, SlotVisit
from paramstore_client import this_process
from paramstore_client.device.loads_ahead import LoadsAhead
from paramstore_client.device.loans import Loans, slots_within
from paramstore_client.device.standing_lease import LeaseEnd, StandingLease
from paramstore_client.handle.base import plain_keys
from paramstore_client.source import ExpertSource, HostLease, HostSource, HostTicket, LeaseTicket, WeightLease

REPORT_EVERY = 1024
"""Visits without a miss between two reports of what was used."""
_log = logging.getLogger(__name__)


class HostSlots:
    """Standing leases in front of a namespace; an `ExpertSource`. May be used from several threads: one visit begins at a time.

    slots: default what the namespace was promised, less a few. policy: one of `paramstore.policy.make.SLOT_POLICIES`; those that
    know an order have the layers visited as the namespace has them, again and again. `refresh` moves what later visits see; called
    from another thread, it may part a visit that is just beginning, and ends one that goes through slots with StepMismatch. A
    daemon that takes nothing off its socket holds all threads up for as long as a request may wait. A key that another visit has
    asked for is waited for as long as that one does.
    """

    is_on_host = True

    def __init__(
        self, namespace: HostSource, *, slots: int | None = None, policy: str = "schedule", layers: Sequence[int] | None = None
    ) -> None:
        self.namespace = namespace
        self.schema: Schema = namespace.schema
        self.layers: Sequence[int] = namespace.layers
        self.experts: int = namespace.experts
        self.may_stand = True
        """Whether leases outlive their visits; whoever puts this in front of a namespace asks that."""
        self.lease_slots = slots_within(namespace) if slots is None else slots
        """Keys that may be in use at once, and stand, whatever others do."""
        self.loans = Loans(len(namespace.layers) * namespace.experts - self.lease_slots if slots is None else 0)
        order = namespace.layers if layers is None else layers
        self._fresh_plan = partial(_plan_of, self.lease_slots, policy, order)
        self._lock = threading.RLock()
        """Reentrant, as a signal's handler may close the store while its thread is in here."""
        self._plan = self._fresh_plan()
        self._leases: dict[Held, HostLease] = {}
        self._arriving: dict[Held, LeaseTicket] = {}
        self._visits: dict[SlotVisit, LeaseEnd] = {}
        """Those under way."""
        self._dropped: deque[LeaseEnd] = deque()
        """Those whose lease nobody has any more: the collector runs anywhere, also under the lock."""
        taken = (self._leases, self._arriving)  # not this object: a cycle would keep the promise until the collector comes by
        self._ahead = LoadsAhead(namespace, lambda held: any(held in among for among in taken))
        self._view = namespace.view_change_count
        self._touched: dict[ExpertKey, None] = {}
        self._visit_count = 0
        self._process_id = this_process.pid
        self._is_deciding = False
        """Whether a visit has begun or ended halfway: it was interrupted, unless it is under way now."""
        weakref.finalize(self, _release_idle, self._leases, self._arriving, self.loans).atexit = False

    @property
    def counts(self) -> SlotCounts:
        """What was counted since this was made, or since an interrupt."""
        return self._plan.counts

    def acquire(self, keys: Sequence[ExpertKey], /, part: str = "param", timeout_s: float | None = None) -> WeightLease:
        """Leases all keys or none; waits for those that do not stand. Raises CapacityError above `lease_slots`, LeaseError where
        visits under way hold the slots, and what the namespace's `acquire` raises. Another part than `param` never stands."""
        if part != "param":
            return self.namespace.acquire(keys, part=part, timeout_s=timeout_s)
        lease = self.acquire_arriving(keys, timeout_s)
        try:
            lease.wait()
        except BaseException:
            lease.release()
            raise
        return lease

    def acquire_arriving(
        self, keys: Sequence[ExpertKey], /, timeout_s: float | None = None, *, may_pass: bool = False
    ) -> StandingLease:
        """Leases all keys or none, as `acquire` does, and waits for none: what does not stand is on its way on return.
        may_pass: any number of keys; those beyond what may stand come and go while the lease is gone through (`in_turn`)."""
        self.namespace.check_usable()  # before the lock: in a forked child another thread's may be held for ever
        with self._lock:
            self._begin()
            try:
                plan, visit = self._visit(keys, timeout_s, may_pass=may_pass)
            except ParamStoreError:
                self._is_deciding = False
                raise
            lease = StandingLease(self, plan, visit, view=self._view, timeout_s=timeout_s)
            self._is_deciding = False
            return lease

    def begin_visit(self, plan: SlotPlan, visit: SlotVisit, lease: StandingLease) -> LeaseEnd:
        """Notes that the visit has an owner, who ends it, unless it is gone before. Called under the lock."""
        end = LeaseEnd(lease, self._dropped.append)
        end.plan, end.visit, end.used = plan, visit, {}
        self._visits[visit] = end
        return end

    def end_visit(self, plan: SlotPlan, visit: SlotVisit) -> None:
        """Ends the visit of a StandingLease. Does nothing a second time, or in a forked child, where the lock may be held."""
        if this_process.pid != self._process_id:
            return
        with self._lock:
            if visit.is_over:
                return
            self._begin()
            self._end(plan, visit)
            self._is_deciding = False
        if not self.may_stand:
            self.give_back()

    def have_come(self, asked: Sequence[Held]) -> list[Held]:
        """Those whose leases have an outcome. Where none has, as far as was heard, listens once: that is a call to the socket."""
        tickets = {held: ticket for held in asked if (ticket := self._arriving.get(held)) is not None}
        if tickets and len(tickets) == len(asked) and not any(ticket.is_settled for ticket in tickets.values()):
            tickets[asked[0]].done()
        return [held for held in asked if held not in tickets or tickets[held].is_settled]

    def let_in(self, plan: SlotPlan, visit: SlotVisit, *, view: int, timeout_s: float | None, due: object = None) -> None:
        """Begins to load as many keys that pass by as get slots. view: that the visit began with. due: the key used next."""
        with self._lock:
            self._begin()
            try:
                if visit.waiting and self.namespace.view_change_count != view:
                    raise StepMismatch("the namespace moved while a layer was computed: call refresh and rollback between forwards")
                with self.namespace.together():
                    evicted = plan.counts.evicted
                    while (held := plan.let_in(visit, due=due)) is not None:
                        if plan.counts.evicted != evicted:
                            self._release_gone()
                        self._begin_load(held, timeout_s)
            except ParamStoreError:
                self._is_deciding = False
                raise
            self._is_deciding = False

    def let_out(self, plan: SlotPlan, visit: SlotVisit, held: Held, *, view: int, timeout_s: float | None) -> None:
        """Gives back the slot of what has passed by, to the visit's next key, which the same message asks for, or else to what was
        to be loaded ahead. view, timeout_s, errors: as for `let_in`."""
        with self._lock, self.namespace.together():
            if visit.is_over:
                return
            self._begin()
            plan.let_out(visit, held)
            self._release_gone([held])
            try:
                if self._ahead.unplaced and not visit.waiting and plan is self._plan:
                    self._load_ahead(self._ahead.unplaced, evicting=0)
            except ParamStoreError as error:  # demand will ask again and raise the error where it matters
                _log.warning("a load ahead was given up: %s", error)
            self._is_deciding = False
            self.let_in(plan, visit, view=view, timeout_s=timeout_s)

    def lease_of(self, held: Held) -> HostLease:
        """The lease that stands for `held`, once it has come. Raises what its load raises, LeaseError where it is gone."""
        lease = self._leases.get(held)
        return self._await(held) if lease is None else lease

    def _await(self, held: Held) -> HostLease:
        """Waits for the lease of `held`, without the lock."""
        ticket = self._arriving.get(held)
        try:
            try:
                lease = None if ticket is None else ticket.wait()
            except LeaseError:  # others lease through this handle too: what stands idle gives them room
                self.give_back()
                lease = self.namespace.acquire([held.key])  # type: ignore[list-item]  # the names are keys here
        except ParamStoreError:
            self._settle(held, None)
            raise
        standing = self._settle(held, lease)
        if standing is None:
            raise LeaseError(f"the lease of {held.key} has ended: its load failed, or its store was closed")
        return standing

    def _settle(self, held: Held, lease: HostLease | None) -> HostLease | None:
        """Notes the outcome of a load, None for one that failed. Gives what stands now: another thread may have been first."""
        with self._lock:
            self._begin()
            if lease is None:
                self._plan.fail(held)
                if (ticket := self._arriving.get(held)) is not None:
                    ticket.abandon()
            else:
                if lease.absent_count and held.is_unproven and not held.is_gone:
                    self._plan.counts.take_back_hit()  # it was loaded ahead, and evicted before the visit
                held.is_unproven = False
                self._leases.setdefault(held, lease)
                self._plan.arrive(held)
                self._touched[held.key] = None  # type: ignore[index]  # the names are keys here
            self._arriving.pop(held, None)  # last: until here an interrupt finds the lease there
            self._is_deciding = False
            return self._leases.get(held)

    def prefetch(self, keys: Sequence[ExpertKey], /, part: str = "param") -> HostTicket:
        """Asks the host for those of `keys` that do not stand, as many as the plan gives slots to: victims are given back first."""
        if part != "param":
            return self.namespace.prefetch(keys, part=part)
        self.namespace.check_usable()
        with self._lock:
            self._begin()
            try:
                with self.namespace.together():
                    ticket = self._load_ahead(plain_keys(keys), evicting=0 if self._plan.is_passing else None)
            except ParamStoreError:
                self._is_deciding = False
                raise
            self._is_deciding = False
        return ticket

    def lacking(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Those of `keys` that neither stand nor are on their way."""
        return [key for key in keys if self._plan.find(key) is None]

    def push(self, gradients: Mapping[ExpertKey, Mapping[str, Tensor]], /) -> object:
        """Hands the gradients to the namespace."""
        return self.namespace.push(gradients)

    def give_back(self) -> None:
        """Releases every lease that no visit uses: they come again as they are needed."""
        with self._lock:
            self._begin()
            leased = (held for held in self._plan.held if held in self._leases or held in self._arriving)
            self._drop([held for held in leased if not held.users])
            self._is_deciding = False

    def skip(self, layers: Sequence[int]) -> None:
        """Notes that these layers are not visited this time: what was loaded ahead for them is spared no more."""
        with self._lock:
            self._begin()
            self._plan.skip(layers)
            self._is_deciding = False

    def close(self) -> None:
        """Cancels loads ahead, and releases every lease that no visit uses. From here on none outlives its visit."""
        with self._lock:
            self._begin()
            self._ahead.cancel(self._plan)
            self.may_stand = self._is_deciding = False
        self.loans.refuse()
        self.give_back()

    def let_go(self) -> None:
        """Releases every lease that no visit uses, as the session ends. Takes no lock."""
        _release_idle(self._leases, self._arriving, self.loans)

    # --- under the lock ---

    def _begin(self) -> None:
        if self._is_deciding:
            self._start_over()
        self._is_deciding = True
        while self._dropped:
            end = self._dropped[0]
            if end.visit in self._visits and end.leaves_slots():
                self._end(end.plan, end.visit)
            self._dropped.popleft()  # an interrupt before it ends the visit again, which does nothing
        if self.loans.count > self.loans.word[0]:
            self.loans.settle(self._plan, self._release_gone)

    def _end(self, plan: SlotPlan, visit: SlotVisit) -> None:
        if plan.end_visit(visit):
            self._release_gone()
        self._visits.pop(visit, None)
        if self.loans.count > self.loans.word[0]:  # what the visit used can be given back now
            self.loans.settle(self._plan, self._release_gone)

    def _start_over(self) -> None:
        """After an interrupt halfway: nothing stands but what visits under way use, which goes with them."""
        users = Counter(held for visit in self._visits if not visit.is_over for held in (*visit.held, *visit.through))
        for held in [*self._leases, *self._arriving]:
            held.is_gone = True
            held.users = users[held]
        for held in self._plan.held:
            held.is_gone = True  # to the old plan's visits too
        self._visits = {visit: end for visit, end in self._visits.items() if not visit.is_over}
        self.loans.end()
        self._plan = self._fresh_plan()
        self._ahead.forget()
        self._release_gone()

    def _visit(self, keys: Sequence[ExpertKey], timeout_s: float | None, *, may_pass: bool) -> tuple[SlotPlan, SlotVisit]:
        if self._view != (view := self.namespace.view_change_count):
            self._ahead.forget()
            self._drop(self._plan.held)  # it is of another view: it is found no more
            self._view = view
        self._visit_count += 1
        if self._visit_count % REPORT_EVERY == 0:
            self._report()
        plan = self._plan
        visit = None if may_pass and len(keys) > plan.held_most else plan.visit_ready(keys)
        if visit is not None:
            self._touched |= dict.fromkeys(keys)
            return plan, visit
        wanted = list[Held]()
        try:
            with self.namespace.together():
                if self._touched:
                    self._report()
                self._ahead.note_arrivals(self._plan, self._arriving)
                self._ahead.unplaced = []  # they are of this visit, or of none
                if self._plan.free <= 0:
                    self.loans.ask(self)
                plan = self._plan  # a signal's handler may have called in, and begun anew
                visit = plan.visit(list(dict.fromkeys(plain_keys(keys))), may_pass=may_pass)
                self._release_gone()
                wanted += [*visit.through, *visit.held]
                for held in wanted:
                    self._begin_load(held, timeout_s)
                self._touched.update((held.key, None) for held in visit.held if held in self._leases)  # type: ignore[misc]
                return plan, visit
        except ParamStoreError:
            if visit is not None:
                plan.end_visit(visit)
            for held in wanted:
                if held not in self._leases:
                    plan.fail(held)
            self._release_gone()
            raise

    def _begin_load(self, held: Held, timeout_s: float | None) -> None:
        if held not in self._leases and held not in self._arriving:
            self._arriving[held] = self.namespace.begin_acquire([held.key], timeout_s=timeout_s)  # type: ignore[list-item]

    def _load_ahead(self, keys: Sequence[ExpertKey], *, evicting: int | None) -> HostTicket:
        """Asks the host for those of `keys` that get a slot; the others wait for slots that a visit which passes by lets go."""
        loads, _ = self._plan.ahead(keys, evicting=evicting)
        self._release_gone()
        self._ahead.unplaced = [key for key in keys if self._plan.find(key) is None]
        return self._ahead.begin(self._plan, loads)

    def _drop(self, dropped: Sequence[Held]) -> None:
        for held in dropped:
            self._plan.drop(held)
        self._release_gone()

    def _release_gone(self, among: Iterable[Held] | None = None) -> None:
        """Releases the leases of what was evicted or dropped, and is in nobody's use. among: where to look; default everywhere."""
        looked_at = [*self._leases, *self._arriving] if among is None else list(among)
        for held in [held for held in looked_at if held.is_gone and not held.users]:
            if (lease := self._leases.get(held)) is not None:
                lease.release()  # a second call does nothing
                self._leases.pop(held, None)
            if (ticket := self._arriving.get(held)) is not None:
                ticket.abandon()
                self._arriving.pop(held, None)

    def _report(self) -> None:
        touched, self._touched = list(self._touched), {}
        self.namespace.report_device(resident=[], touched=touched, bytes_resident=0)


def standing(namespace: HostSource, *, slots: int | None = None, policy: str = "schedule") -> ExpertSource:
    """Puts slots in front of a namespace, where leases may stand; else returns the namespace itself."""
    cache = HostSlots(namespace, slots=slots, policy=policy)
    return cache if cache.loans.lend_by(namespace.let_stand(cache)) else namespace


def _plan_of(slots: int, policy: str, layers: Sequence[int]) -> SlotPlan:
    return SlotPlan(slots, make_slot_policy(policy, slots, layers), held_most=most_for_one(slots))


def _release_idle(leases: dict[Held, HostLease], arriving: dict[Held, LeaseTicket], loans: Loans) -> None:
    """Gives back what no visit uses, and loans; a forward under way on another thread keeps its bytes, as any lease at a close."""
    for held in list(arriving):
        if not held.users and (ticket := arriving.pop(held, None)) is not None:
            ticket.abandon()
    for held in list(leases):
        if not held.users and (lease := leases.pop(held, None)) is not None:
            lease.release()
    loans.end()
