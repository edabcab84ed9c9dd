"""How many slots a cache on the host has: those within its promise, and those that it borrows beyond it until others need them.

- The daemon says by a word in shared memory how many borrowed slots may be kept. It is read when a visit begins and ends, and where
  it is lower than what there is, idle leases are given back within that call; a lease in use when its visit ends.
- A model that computes nothing makes no visit: while something is lent or asked for, a thread looks several times a second.
- More is asked for with a miss that finds no free slot, and taken by the next call that finds the answer: nobody waits for it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from paramstore.errors import ParamStoreError
from paramstore.policy.slot_plan import SlotPlan
from paramstore_client.source import HostSource, LeaseKeeper, Lender, LoanTicket

LEFT_FREE = 64
"""One of so many leases, at least one, is left to who else leases through the handle, unless every key can stand."""
ASK_PAUSE_S = 1.0
"""Shortest time between two requests to borrow, and between giving back and asking again."""
LOOK_PAUSE_S = 0.2
"""Time between two looks at the word of a cache that nobody visits: a twentieth of what an opening waits."""
NOTHING: Sequence[int] = (0,)
DUE: Sequence[int] = (-1,)
"""Stands in the word's place where `settle` has something to do whatever the daemon says: an answer may have come."""


class Borrower(LeaseKeeper, Protocol):
    """Who has the slots: `HostSlots`."""

    def skip(self, layers: Sequence[int], /) -> None:
        """With no layers: looks at the word, as every call does, and does nothing else."""
        ...


def slots_within(namespace: HostSource) -> int:
    """Keys that may stand within what was promised."""
    promised, key_count = namespace.lease_slots, len(namespace.layers) * namespace.experts
    return key_count if promised >= key_count else max(1, promised - max(1, promised // LEFT_FREE))


class Loans:
    """Slots that one cache has borrowed. Used under its owner's lock; `count` and `word` are read anywhere.

    most: slots beyond the promise that are of use. The plan has `count` slots more than without a loan.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self.word = NOTHING
        """Where its one number is lower than `count`, `settle` is due: the word of the daemon, which says how many may be kept."""
        self._lent: Sequence[int] = NOTHING
        """The word of the daemon, once something was lent."""
        self._lender: Lender | None = None
        self._asked: LoanTicket | None = None
        self._ask_again_s = 0.0
        self._may_be_lent = False
        """Whether something was asked for since everything was given back: after an interrupt nobody knows what came of it."""
        self._is_leaving = False
        """Whether the owner was closed."""
        self._ended = threading.Event()
        """Set when the thread that looks is needed no more; each has its own."""
        self._ended.set()
        _all.add(self)

    def lend_by(self, lender: Lender | None) -> bool:
        """Has the lender asked from now on; None: nothing may stand, and this returns False."""
        self._lender = lender
        return lender is not None

    def ask(self, owner: Borrower) -> None:
        """Asks for more, unless it was asked for just now or nothing more is of use. Never waits."""
        if self._lender is None or self._asked is not None or self.count >= self.most or time.monotonic() < self._ask_again_s:
            return
        self._ask_again_s = time.monotonic() + ASK_PAUSE_S
        self._may_be_lent = True
        with suppress(ParamStoreError):  # demand, which comes next, raises what is wrong
            self._asked = self._lender.begin_borrow(owner, self.most)
        if self._asked is None:
            return
        self.word = DUE
        if self._ended.is_set():
            self._ended = threading.Event()
            arguments = weakref.ref(owner), self, self._ended
            with suppress(RuntimeError):  # none can be started, as at the interpreter's end: visits look all the same
                threading.Thread(target=_look, args=arguments, name="paramstore-loans", daemon=True).start()

    def settle(self, plan: SlotPlan, release_gone: Callable[[], None]) -> None:
        """Takes what was lent meanwhile: the plan grows by as many. Gives back what is asked for, as far as no visit uses it.
        release_gone: releases the leases of what was evicted."""
        if self._asked is not None and self.most and self._asked.done():
            plan.grow(self._take(self._asked))
        kept, given = self._lent[0] if self.most else 0, 0
        if self.count > kept:
            given = plan.shrink(self.count - kept)
            release_gone()
        if given or (not self.most and (self._asked is not None or not self.count)):
            self._keep(self.count - given)

    def _take(self, asked: LoanTicket) -> int:
        self._asked, before = None, self.count
        with suppress(ParamStoreError):  # nothing more is lent: the step was dropped, or the daemon has no page
            count, self._lent = asked.wait()
            self.count = max(self.count, count)
        self.word = self._lent
        if not self.count:
            self._ended.set()
        return self.count - before

    def refuse(self) -> None:
        """Has all that is lent given back by the next call of the owner, what visits use at their end, and nothing asked for any
        more. Who keeps leases of the handle beside the owner may borrow then."""
        self.most, self._is_leaving = 0, True
        if self._may_be_lent:
            self.word = DUE
        elif self._lender is not None:
            self._lender.leave()

    def end(self) -> None:
        """Gives everything back, whatever is in use: the owner starts anew, or is gone. Takes no lock, neither waits nor raises."""
        if self._may_be_lent:
            self._keep(0)

    def _keep(self, kept: int) -> None:
        """Tells the lender first: after an interrupt in between there is more here than was kept, and never less."""
        assert self._lender is not None, "nothing is lent without a lender"
        self._lender.give_back(kept)
        if self._asked is not None:
            self._asked.abandon()
            self._asked = None
        self.count = kept
        self.word = self._lent if self.most else NOTHING
        self._ask_again_s = time.monotonic() + ASK_PAUSE_S
        if not kept:
            self.word = self._lent = NOTHING
            self._ended.set()
            self._may_be_lent = False
            if self._is_leaving:
                self._lender.leave()

    def forget(self) -> None:
        """In a forked child: nothing is lent to it, and the page of words is not mapped there."""
        self.count, self.word, self._lent = 0, NOTHING, NOTHING
        self._lender = self._asked = None
        self._may_be_lent = False


def _forget_in_child() -> None:
    for loans in list(_all):
        loans.forget()


_all: weakref.WeakSet[Loans] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_in_child)


def _look(owner: weakref.ref[Borrower], loans: Loans, ended: threading.Event) -> None:
    """Looks at the word until nothing is lent any more, and has the owner give back what is asked for."""
    while not ended.wait(LOOK_PAUSE_S):
        slots = owner() if loans.count > loans.word[0] else None
        if slots is not None:
            slots.skip(())
        del slots
