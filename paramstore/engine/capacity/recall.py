"""The wait of a handle that opens for slots that readers were lent: they are asked back, and come back or not within a bound.

A client gives back what no kernel of its uses as soon as it looks at its word. One that is stopped, or computes on the bytes, is
not waited for any longer: what it has it keeps, and whoever opens gets the rest or the error that names it. Until it answers again,
only who asks for a number of slots waits for it. A process that is killed closes its connection a moment before it has ended, and
what it leased with it: who cannot open without those slots waits for that end as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType

from paramstore.engine.planner.promises import Opening
from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import CapacityError

RECALL_WAIT_S = 5.0
"""Longest wait for lent slots: an idle client looks several times a second, and a kernel takes less than that."""


class Recall:
    """One opening's claim on what is lent, for the length of a `with` block, in which nothing more is lent. wait_s: for all waits
    together."""

    def __init__(self, transfers: Transfers, namespace: NamespaceState, opening: Opening, *, wait_s: float) -> None:
        self.opening = opening
        self._transfers = transfers
        self._namespace = namespace
        self._wait_s = wait_s
        self._deadline_s: float | None = None
        """The end of the wait, which begins when slots are asked back first."""
        self._woken: asyncio.Future[None] | None = None

    def __enter__(self) -> Recall:
        with self._transfers.deciding() as planner:
            planner.loans.begin_opening(self._namespace)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._transfers.deciding() as planner:
            spared = planner.loans.end_opening(self._namespace)
        _tell(spared)

    def is_over(self) -> bool:
        """Asks back what is lent too much, and says whether there is nothing to wait for: all has come back, or the time is over.

        Raises CapacityError where what is asked for is not even left beside promises, and no client that is gone holds slots whose
        end could be waited for. The namespace has its memory.
        """
        loop = asyncio.get_running_loop()
        has_time = self._deadline_s is None or loop.time() < self._deadline_s
        with self._transfers.deciding() as planner:
            try:
                owed, asked = planner.views.recall(self._namespace, self.opening)
                is_waiting = owed > 0 and (self.opening.least > 0 or planner.loans.is_awaited(self._namespace))
            except CapacityError:
                if not (has_time and planner.loans.is_ending(self._namespace)):
                    raise
                is_waiting, asked = True, []
            if is_waiting and not has_time:
                planner.loans.note_silence(self._namespace)
                is_waiting = False
            if is_waiting:
                self._woken = loop.create_future()
                planner.loans.await_loans(self._namespace, self._woken)
        _tell(asked)
        if is_waiting:
            self._deadline_s = self._deadline_s or loop.time() + self._wait_s
        return not is_waiting

    async def wait(self) -> None:
        """Returns when slots may have come back, or the time is over."""
        assert self._woken is not None, "is_over says first whether there is something to wait for"
        assert self._deadline_s is not None
        timeout_s = self._deadline_s - asyncio.get_running_loop().time()
        await asyncio.wait([self._woken], timeout=max(0.0, timeout_s))


def _tell(views: Iterable[View]) -> None:
    for view in views:
        if view.client is not None:
            view.client.loans.tell(view)
