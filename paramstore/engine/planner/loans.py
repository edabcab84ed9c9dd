"""How many slots a reader is lent beyond its promise, and how many have to come back before another handle opens.

- Promises, loans and what those hold who take no more leases are together at most the slots that are there, less the reserve: so
  nobody within its promise ever waits for a loan. Loans are made of slots that are there, never of those that are planned.
- A reader has at most half of what promises and other loans leave. A writer is lent nothing, and nobody is while a handle opens.
- A slot that is asked back is lent until it was given back; one that is leased beyond promise and loan counts as lent.
"""

from __future__ import annotations

from paramstore.engine.planner.promises import held_by, reserve_of
from paramstore.engine.tables.moves import Outbox
from paramstore.engine.tables.namespace import NamespaceState, View


class LoanPlanner:
    """Decides about loans; part of the planner, on the event-loop thread."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    @staticmethod
    def lend(view: View, count: int) -> int:
        """Lends a view slots up to `count` in all, as far as there are any. Returns how many it has then, no fewer than before.
        Raises as `View.check_open`."""
        view.check_open()
        namespace, loan = view.namespace, view.loan
        if not view.is_writer and not namespace.openings:
            others = sum(_lent(other) for other in _going_on(namespace, is_writer=False) if other is not view)
            offered = (_room(namespace, is_writer=False) - others) // 2
            loan.count = loan.may_keep = max(loan.count, min(count, offered))
        return loan.count

    def take_back(self, view: View, kept: int) -> None:
        """Notes that a view has given back all but `kept` of what it was lent."""
        loan = view.loan
        loan.count = max(0, min(loan.count, kept))
        loan.may_keep = min(loan.may_keep, loan.count)
        loan.is_silent = False
        wake_openings(self._outbox, view.namespace)

    @staticmethod
    def owed(namespace: NamespaceState, promised: int, *, is_writer: bool) -> int:
        """Slots that are lent and must come back before a handle that opens now has `promised` ones. is_writer: whether it fences
        those who write."""
        lent = sum(_lent(view) for view in _going_on(namespace, is_writer=is_writer))
        return max(0, min(lent, lent + promised - _room(namespace, is_writer=is_writer)))

    @staticmethod
    def recall(namespace: NamespaceState, count: int) -> list[View]:
        """Asks `count` slots back, those among them that are asked back already, of the largest loans first, and of those who did
        not answer last. Returns the views that may keep fewer now."""
        borrowers = _going_on(namespace, is_writer=False)
        lacking = count - sum(_lent(view) - view.loan.may_keep for view in borrowers)
        asked = []
        for view in sorted(borrowers, key=lambda view: (view.loan.is_silent, -view.loan.may_keep)):
            if lacking <= 0:
                break
            taken = min(lacking, view.loan.may_keep)
            view.loan.may_keep -= taken
            lacking -= taken
            if taken:
                asked.append(view)
        return asked

    @staticmethod
    def is_awaited(namespace: NamespaceState) -> bool:
        """Whether slots are asked back of a client that has answered so far, or was not asked before."""
        return any(_lent(view) > view.loan.may_keep for view in _going_on(namespace, is_writer=False) if not view.loan.is_silent)

    @staticmethod
    def is_ending(namespace: NamespaceState) -> bool:
        """Whether a client whose session is gone still holds slots: they come back when its process has ended. A writer that was
        fenced by another is in its group still: its process goes on."""
        fenced = [view for view in namespace.views if view.is_fenced and view.leased]
        return any(view.group is None or view not in view.group.members.values() for view in fenced)

    @staticmethod
    def note_silence(namespace: NamespaceState) -> None:
        """Notes who has let an opening's wait pass: openings that ask for no slots wait for them no more, until they answer."""
        for view in _going_on(namespace, is_writer=False):
            view.loan.is_silent |= _lent(view) > view.loan.may_keep

    @staticmethod
    def begin_opening(namespace: NamespaceState) -> None:
        """Notes that a handle is being opened: nothing is lent until `end_opening`."""
        namespace.openings += 1

    @staticmethod
    def end_opening(namespace: NamespaceState) -> list[View]:
        """Notes that an opening is over. Returns the views that may keep more again, since no other opening needs what was asked
        back and is still lent."""
        namespace.openings -= 1
        if namespace.openings:
            return []
        namespace.loan_waiters.clear()
        asked = [view for view in namespace.views if view.loan.may_keep < view.loan.count]
        for view in asked:
            view.loan.may_keep = view.loan.count
        return asked

    @staticmethod
    def await_loans(namespace: NamespaceState, future: object) -> None:
        """Notes a future that is woken when slots may have come back."""
        namespace.loan_waiters.append(future)


def wake_openings(outbox: Outbox, namespace: NamespaceState) -> None:
    """Lets the openings that wait for lent slots look again; to be called after slots were given back, or leases ended."""
    outbox.woken.extend(namespace.loan_waiters)
    namespace.loan_waiters.clear()


def _going_on(namespace: NamespaceState, *, is_writer: bool) -> list[View]:
    """The views that take leases once a handle has opened: not those that are fenced, or will be by a writer."""
    return [view for view in namespace.views if not (view.is_fenced or (is_writer and view.is_writer))]


def _room(namespace: NamespaceState, *, is_writer: bool) -> int:
    """Slots that may be lent: those that are there, less the reserve, what is promised, and what those hold who take no more."""
    going_on = _going_on(namespace, is_writer=is_writer)
    ended = held_by(view for view in namespace.views if view not in going_on)
    there = namespace.memory.param.slots.count
    return there - reserve_of(there) - sum(view.lease_slots for view in going_on) - ended


def _lent(view: View) -> int:
    return max(view.loan.count, len(view.leased) - view.lease_slots)
