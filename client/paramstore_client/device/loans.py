"""How many slots a cache on the host has: those within its promise, and those that it borrows beyond it until others need them.

- The daemon says by a word in shared memory how many borrowed slots may be kept. It is read when a visit begins and ends, and where
  it is lower than what there is, idle leases are given back within that call; a lease in use when its visit ends.
- A model that computes nothing makes no visit: while something is lent, a thread looks several times a second.
- More is asked for with a miss that finds no free slot, and taken with a later one: nobody waits for it.
"""

from __future__ import annotations

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
        """Its one number: how many of `count` may be kept. Lower: `give_back` is due."""
        self._lender: Lender | None = None
        self._asked: LoanTicket | None = None
        self._ask_again_s = 0.0
        self._may_be_lent = False
        """Whether something was asked for since everything was given back: after an interrupt nobody knows what came of it."""
        self._ended = threading.Event()
        """Set when the thread that looks is needed no more; each has its own."""

    def lend_by(self, lender: Lender | None) -> bool:
        """Has the lender asked from now on; None: nothing may stand, and this returns False."""
        self._lender = lender
        return lender is not None

    def more(self, owner: Borrower, *, is_full: bool) -> int:
        """Slots that were lent since the last call: the plan grows by as many. Asks for more where all are full. Never waits."""
        if self._asked is not None:
            return self._take(self._asked, owner) if self._asked.done() else 0
        if self._lender is None or not is_full or self.count >= self.most or time.monotonic() < self._ask_again_s:
            return 0
        self._ask_again_s = time.monotonic() + ASK_PAUSE_S
        self._may_be_lent = True
        try:
            self._asked = self._lender.begin_borrow(owner, self.most)
        except ParamStoreError:  # demand, which comes next, raises what is wrong
            return 0
        return 0

    def _take(self, asked: LoanTicket, owner: Borrower) -> int:
        self._asked = None
        try:
            count, self.word = asked.wait()
        except ParamStoreError:  # nothing more is lent: the step was dropped, or the daemon has no page
            return 0
        grown = max(0, count - self.count)
        self.count += grown
        if grown and grown == self.count:
            self._ended = threading.Event()
            arguments = weakref.ref(owner), self, self._ended
            with suppress(RuntimeError):  # none can be started, as at the interpreter's end: visits look all the same
                threading.Thread(target=_look, args=arguments, name="paramstore-loans", daemon=True).start()
        return grown

    def give_back(self, plan: SlotPlan, release_gone: Callable[[], None]) -> None:
        """Gives back what is asked for, as far as no visit uses it. release_gone: releases the leases of what was evicted."""
        given = plan.shrink(self.count - self.word[0])
        release_gone()
        if given:
            self._keep(self.count - given)

    def refuse(self) -> Sequence[int]:
        """Has all that is lent given back by the next call of the owner, and nothing asked for any more. Returns no layers."""
        self.most, self.word = 0, NOTHING
        return ()

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
        self._ask_again_s = time.monotonic() + ASK_PAUSE_S
        if not kept:
            self._ended.set()
            self._may_be_lent = False


def _look(owner: weakref.ref[Borrower], loans: Loans, ended: threading.Event) -> None:
    """Looks at the word until nothing is lent any more, and has the owner give back what is asked for."""
    while not ended.wait(LOOK_PAUSE_S):
        slots = owner() if loans.count > loans.word[0] else None
        if slots is not None:
            slots.skip(())
        del slots
