"""Loads ahead of host slots on their way: which keys were asked for, and what has come of them.

- A load ahead is a prefetch of one key into host memory, so that each is known by itself to have come; what has come is leased when
  it is visited.
- Whose slots are given up here was not taken over by demand meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from paramstore.core.key import ExpertKey
from paramstore.errors import ParamStoreError
from paramstore.policy.slot_plan import SlotPlan
from paramstore.policy.slot_visit import Held
from paramstore_client.source import HostSource, HostTicket, LeaseTicket

AHEAD_MAX = 256
"""Most loads ahead whose outcome is awaited, or two whole layers; beyond it the oldest counts as not arrived."""

_log = logging.getLogger(__name__)


class KeyTickets(HostTicket):
    """The ticket of a prefetch whose keys have one each; of none, where there was nothing to fetch."""

    def __init__(self, tickets: Sequence[HostTicket]) -> None:
        self._tickets = tickets

    def done(self) -> bool:
        return all(ticket.done() for ticket in self._tickets)

    def wait(self, timeout_s: float | None = None) -> Mapping[str, int]:
        """Waits for all of them, `timeout_s` at most. Raises the error of the first that failed, and WaitTimeout."""
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        sums = dict.fromkeys(("loaded", "resident", "skipped", "bytes"), 0)
        for ticket in self._tickets:
            result = ticket.wait(None if ends_s is None else max(0.0, ends_s - time.monotonic()))
            sums = {name: count + result[name] for name, count in sums.items()}
        return sums

    def cancel(self) -> bool:
        """Gives up those that can be; whether there was one."""
        return sum(ticket.cancel() for ticket in self._tickets) > 0


class LoadsAhead:
    """Owner of the prefetches under way, and of the keys that found no slot. Used under its owner's lock.

    is_taken: whether demand has asked for the bytes of a load itself.
    """

    def __init__(self, namespace: HostSource, is_taken: Callable[[Held], bool]) -> None:
        self.unplaced: list[ExpertKey] = []
        """Keys of the newest loads ahead that found no slot."""
        self._namespace = namespace
        self._is_taken = is_taken
        self._under_way: deque[tuple[HostTicket, Held]] = deque()

    def begin(self, plan: SlotPlan, loads: Sequence[Held]) -> KeyTickets:
        """Asks for the bytes of `loads`, which `plan` has given slots. Raises what `prefetch` raises; the slots of what was not
        asked for are free then."""
        tickets = list[HostTicket]()
        for place, held in enumerate(loads):
            try:
                ticket = self._namespace.prefetch([held.key])  # type: ignore[list-item]  # the names are keys here
            except ParamStoreError:
                self._give_up(plan, loads[place:])
                raise
            tickets.append(ticket)
            self._under_way.append((ticket, held))
            if len(self._under_way) > max(AHEAD_MAX, 2 * self._namespace.experts):
                self._give_up(plan, [self._under_way.popleft()[1]])
        return KeyTickets(tickets)

    def note_arrivals(self, plan: SlotPlan, demanded: dict[Held, LeaseTicket] | None = None) -> None:
        """Tells the plan which loads have come; the slot of what the host had no room for is free. demanded: loads on demand under
        way; those that have failed behind their visit's end are given up too."""
        drop_failed(plan, demanded or {})
        while self._under_way and self._under_way[0][0].done():
            ticket, held = self._under_way.popleft()
            try:
                result = ticket.wait()
                has_come = not result["skipped"]
                plan.counts.ahead_bytes += result["bytes"]
            except ParamStoreError as error:  # demand will ask again and raise the error where it matters
                _log.warning("a load ahead of %s was given up: %s", held.key, error)
                has_come = False
            if has_come:
                plan.arrive(held)
            else:
                self._give_up(plan, [held])

    def cancel(self, plan: SlotPlan) -> None:
        """Cancels all of them: nobody will visit what they bring."""
        while self._under_way:
            ticket, held = self._under_way.popleft()
            ticket.cancel()
            self._give_up(plan, [held])
        self.unplaced = []

    def forget(self) -> None:
        """Forgets all of them: they are of another view, or of another plan."""
        self._under_way.clear()
        self.unplaced = []

    def _give_up(self, plan: SlotPlan, loads: Sequence[Held]) -> None:
        """Takes slots back from loads that bring nothing, unless demand has taken them over."""
        for held in loads:
            if not self._is_taken(held):
                plan.fail(held)


def drop_failed(plan: SlotPlan, arriving: dict[Held, LeaseTicket]) -> None:
    """Takes slots back from loads on demand that have failed after their visit had ended, by the failure of another key: who visits
    them next asks again, and does not hear of it."""
    for held, ticket in list(arriving.items()):  # a close on another thread takes off too
        if held.users or not ticket.done():
            continue
        try:
            ticket.wait()
        except ParamStoreError:
            plan.fail(held)
            ticket.abandon()
            arriving.pop(held, None)
