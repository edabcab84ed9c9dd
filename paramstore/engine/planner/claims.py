"""The planner's rules for the claims of applies: what an apply takes, plain or open, and in which order it is updated."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.optimizers import Options
from paramstore.engine.planner.apply_order import awaited_keys, backward_order, due_keys, update_order
from paramstore.engine.planner.leases import LeasePlanner
from paramstore.engine.planner.param_copies import CopyPlanner
from paramstore.engine.tables.apply import Claimed, Claims
from paramstore.engine.tables.moves import Outbox
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.requests import SlotRequest, Urgency


class ClaimPlanner:
    """Decides about claims; part of the planner, on the event-loop thread."""

    def __init__(self, outbox: Outbox, copies: CopyPlanner, leases: LeasePlanner) -> None:
        self._outbox = outbox
        self._copies = copies
        self._leases = leases

    def begin(self, namespace: NamespaceState, options: Options | None = None) -> Claimed:
        """Claims what is pending. From here on the writer sees the bytes that this apply will make.

        options: the apply's. Returns the claimed keys with their gradients; those of an exact namespace that are due have none.
        """
        claimed: Claimed = dict(namespace.writing.pending)
        namespace.writing.pending = {}
        if namespace.is_exact:
            assert options is not None
            kept_since = min(
                namespace.writing.applies, namespace.writing.log.last
            )  # an apply that was open counts as soon as it updates
            namespace.writing.log = namespace.writing.log.trimmed(kept_since).appended(namespace.epoch, options)
            claimed = dict.fromkeys(due_keys(namespace), ()) | claimed
        self._claim(namespace, claimed, apply=namespace.writing.log.last)
        if namespace.is_exact:
            self._copies.evict_left_behind(namespace)
        self._leases.pump(namespace)
        return claimed

    def _claim(self, namespace: NamespaceState, keys: Iterable[ExpertKey], *, apply: int) -> None:
        """Makes the writer see `keys` as an apply will leave them. apply: its number, used in an exact namespace only."""
        for key in keys:
            working = namespace.residency.working[key]
            assert working.target is not None
            older, working.current = working.current, None
            version = apply if namespace.is_exact else working.target.version + 1
            working.target = Identity(namespace.epoch, version)
            if older is not None:
                self._copies.supersede(namespace, older)

    @staticmethod
    def open(namespace: NamespaceState, claims: Claims) -> None:
        """Begins an apply that claims keys as their gradients come. Nothing changes before its first claim."""
        namespace.writing.open_apply = claims

    def begin_updates(self, namespace: NamespaceState, claims: Claims, *, pipeline_slots: int) -> None:
        """Begins the updates of an apply whose turn has come: it counts from here on. See `line_up` and `_await_resident`."""
        if claims.is_open:
            self._await_resident(namespace, claims, pipeline_slots=pipeline_slots)
        else:
            namespace.memory.working.policy.expect(claims.gradients)
            self.line_up(namespace, claims, claims.gradients, pipeline_slots=pipeline_slots)
        namespace.writing.applies += 1

    @staticmethod
    def next_key(claims: Claims) -> ExpertKey | None:
        """Takes the key to update next; None while none waits."""
        if not claims.queue:
            return None
        key = claims.queue.popleft()
        claims.awaited.discard(key)
        return key

    @staticmethod
    def _await_resident(namespace: NamespaceState, claims: Claims, *, pipeline_slots: int) -> None:
        """Prepares an open apply to update: chooses the records in memory that are claimed, or probably will be, and that it must
        not evict before their update. Queues what is in memory first.

        pipeline_slots: how many of the arena's slots are left for other records meanwhile.
        """
        arena = namespace.memory.working
        heat = {key: arena.policy.heat(key) for key in namespace.residency.resident}
        claims.awaited.update(awaited_keys(heat, len(heat) + arena.slots.free_count - pipeline_slots))
        present, absent = backward_order(claims.queue, namespace.residency.resident)
        claims.queue = deque([*present, *absent])
        arena.policy.expect(claims.awaited | claims.gradients.keys())

    @staticmethod
    def line_up(namespace: NamespaceState, claims: Claims, keys: Iterable[ExpertKey], *, pipeline_slots: int) -> None:
        """Puts `keys`, all that is left to update, into the best order; nothing more will be claimed. Records in memory that wait
        for their turn are not evicted; `pipeline_slots` of the arena's slots are left for the others."""
        arena = namespace.memory.working
        order, kept = update_order(keys, namespace.residency.resident, given_up=max(0, pipeline_slots - arena.slots.free_count))
        claims.queue, claims.awaited = deque(order), set(kept)

    def claim(self, namespace: NamespaceState, claims: Claims, keys: Sequence[ExpertKey]) -> None:
        """Lets the open apply claim `keys`, whose pending gradients are complete: from here on the writer sees them as the apply
        will leave them. In an exact namespace it sees every other key as it stood before, until the apply is closed."""
        for key in keys:
            claims.gradients[key] = namespace.writing.pending.pop(key)
        self._claim(namespace, keys, apply=namespace.writing.log.last + 1)
        present, absent = backward_order(keys, namespace.residency.resident)
        claims.queue.extendleft(present)  # these need no transfer
        claims.queue.extend(absent)
        self._leases.pump(namespace)
        self._wake(claims)

    def close(self, namespace: NamespaceState, claims: Claims, *, pipeline_slots: int) -> None:
        """Closes the open apply: it claims what a plain one would, and its work becomes urgent. pipeline_slots: see `line_up`."""
        self.end(namespace, claims)
        taken = claims.gradients.keys() - claims.queue
        claims.gradients |= self.begin(namespace, claims.options)
        self.line_up(namespace, claims, claims.gradients.keys() - taken, pipeline_slots=pipeline_slots)
        for arena in namespace.arenas():
            for request in arena.waiting:
                if isinstance(request, SlotRequest):
                    request.urgency = Urgency.DEMAND
        self._outbox.promoted.extend(namespace.residency.working[key] for key in taken)
        self._leases.pump(namespace)

    def end(self, namespace: NamespaceState, claims: Claims) -> None:
        """Ends the open apply's claims: nothing more is claimed."""
        namespace.writing.open_apply = None
        claims.is_open = False
        self._wake(claims)

    def wake(self, namespace: NamespaceState) -> None:
        """Wakes an open apply that waits for gradients, so that it looks whether it is to stop."""
        if namespace.writing.open_apply is not None:
            self._wake(namespace.writing.open_apply)

    def _wake(self, claims: Claims) -> None:
        self._outbox.woken.extend((*claims.waiters, *claims.take_room_waiters()))
        claims.waiters.clear()
