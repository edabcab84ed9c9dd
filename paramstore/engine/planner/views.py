"""The planner's rules for views: who opens one with how many slots, which step it stands on, and what ends with it."""

from __future__ import annotations

from collections.abc import Iterable

from paramstore.core.key import ExpertKey
from paramstore.core.visits import Visits
from paramstore.engine.planner.leases import LeasePlanner
from paramstore.engine.planner.loans import LoanPlanner, wake_openings
from paramstore.engine.planner.param_copies import CopyPlanner
from paramstore.engine.planner.promises import Opening, holders, promise
from paramstore.engine.planner.schedules import choose_schedule, declare_schedule
from paramstore.engine.tables.moves import Outbox
from paramstore.engine.tables.namespace import NamespaceState, StepRequest, View, ViewClient, WriterGroup
from paramstore.errors import CapacityError, LeaseError, ParamStoreError
from paramstore.storage.catalog.base import StepRow


class ViewPlanner:
    """Decides about views; part of the planner, on the event-loop thread."""

    def __init__(
        self, outbox: Outbox, copies: CopyPlanner, leases: LeasePlanner, loans: LoanPlanner, *,
        reader_slots: int | None = None,
    ) -> None:  # fmt: skip
        self._outbox = outbox
        self._copies = copies
        self._leases = leases
        self._loans = loans
        self._reader_slots = reader_slots

    def promise(self, namespace: NamespaceState, opening: Opening) -> int:
        """Returns how many slots a view that opens now may lease, the least that it asks for or more: see `promises.promise`, less
        what was asked back and is still lent.

        Raises CapacityError naming the holders, where that is less than it asks for.
        """
        slots, owed = self._promise(namespace, opening)
        had, least = max(0, slots - owed) // opening.world_size, opening.least
        if had < least:
            raise CapacityError(
                f"namespace {namespace.name!r}: min_lease_slots={least}, but {owed} slots that are lent were not given back in "
                f"time: {holders(namespace)}; close one, ask for less, or try again"
            )
        return had

    def recall(self, namespace: NamespaceState, opening: Opening) -> tuple[int, list[View]]:
        """Asks back what has to come back for a view that is to open. Returns how many slots are still lent too many for its whole
        promise, and the views whose clients are to be told. Raises CapacityError where what it asks for is not left beside
        promises."""
        _, owed = self._promise(namespace, opening)
        return owed, self._loans.recall(namespace, owed)

    def _promise(self, namespace: NamespaceState, opening: Opening) -> tuple[int, int]:
        """(slots that those who open together are to be promised, how many of them are lent and must come back)."""
        slots = promise(namespace, opening, reader_slots=self._reader_slots) * opening.world_size
        return slots, self._loans.owed(namespace, slots, is_writer=opening.is_writer)

    def open(self, namespace: NamespaceState, opening: Opening, *, step: int | None = None) -> View:
        """Opens a reader's view of `step`, or a writer's, rank 0's where several open together, which fences earlier writers.

        Raises CapacityError where what it asks for is not left to promise; nothing has changed then.
        """
        slots, group = self.promise(namespace, opening), opening.group
        if group is None:
            view = View(namespace, is_writer=False, step=step, lease_slots=slots, most_slots=opening.most)
            namespace.views.append(view)
            return view
        if namespace.writing.group is not None:
            self.fence(namespace.writing.group)
        namespace.writing.group, group.lease_slots = group, slots
        return self.open_rank(namespace, group, 0)

    @staticmethod
    def open_rank(namespace: NamespaceState, group: WriterGroup, rank: int) -> View:
        """Opens the view of one rank of the group that writes."""
        view = View(namespace, is_writer=True, step=None, lease_slots=group.lease_slots, group=group, rank=rank)
        namespace.views.append(view)
        group.join(view)
        choose_schedule(namespace)
        return view

    def fence(self, group: WriterGroup) -> None:
        """Fences the views of `group`, since another writer opens the namespace."""
        group.fence()
        wake_openings(self._outbox, group.first.namespace)
        self._wake(group.members.values())

    def close(self, view: View) -> None:
        """Closes a view: ends its leases and waiting requests, and drops a writer's pending gradients."""
        namespace = view.namespace
        view.is_closed = True
        for request in list(view.leases.values()):
            self._leases.cancel_lease(request, LeaseError("the session ended"))
        if view in namespace.views:
            namespace.views.remove(view)
        wake_openings(self._outbox, namespace)
        self._wake([view])
        self._leave_group(view)
        if view.declared is not None:
            choose_schedule(namespace)
        self.see_less(namespace)

    def end_writing(self, view: View) -> None:
        """Ends a view's writing only: its session is gone, but its process may still read what it leased."""
        view.is_fenced = True
        wake_openings(self._outbox, view.namespace)
        self._leave_group(view)
        choose_schedule(view.namespace)

    @staticmethod
    def _leave_group(view: View) -> None:
        """Takes a writer's view out of its group. All pending gradients go with any of the ranks: none can be applied any more."""
        group, namespace = view.group, view.namespace
        if group is None or group.members.get(view.rank) is not view:
            return
        del group.members[view.rank]
        if namespace.writing.group is group:
            namespace.writing.pending.clear()
            if not group.members:
                namespace.writing.group = None

    def move(self, view: View, step: int) -> None:
        """Moves a reader's view to `step`; what it leased before stays leased."""
        view.step = step
        view.epoch = view.namespace.epoch
        view.is_dropped = False
        self.see_less(view.namespace)

    @staticmethod
    def introduce(view: View, client: ViewClient) -> None:
        """Notes the session that the view belongs to."""
        view.client = client

    @staticmethod
    def protect(view: View, keys: Iterable[ExpertKey], *, is_wanted: bool) -> None:
        """Notes that the view's client wishes to keep `keys` in memory, or does so no more."""
        view.protected = view.protected.union(keys) if is_wanted else view.protected.difference(keys)

    @staticmethod
    def report_device(
        view: View, resident: Iterable[ExpertKey], touched: Iterable[ExpertKey], *, bytes_resident: int
    ) -> None:
        """Notes what the client's HBM tier holds. Its uses, `touched`, count as uses of what is in host memory."""
        view.device_resident, view.device_bytes = frozenset(resident), bytes_resident
        namespace = view.namespace
        if namespace.has_memory:
            for key in touched:
                if key in namespace.residency.copies:
                    namespace.memory.param.policy.record(key)

    @staticmethod
    def declare(view: View, *, param: Visits, optim: Visits) -> None:
        """Declares that `view` visits its layers in these cycles from now on; both empty: takes back its declaration."""
        declare_schedule(view, param=param, optim=optim)

    def see_less(self, namespace: NamespaceState) -> None:
        """After views or steps went: retires copies that nobody sees any more, and lets whoever waits for their slots go on."""
        self._copies.retire_unseen(namespace, list(namespace.residency.copies))
        self._leases.pump(namespace)

    def close_steps(self, namespace: NamespaceState, steps: Iterable[int]) -> None:
        """Notes the steps that the transaction under way drops, so that nobody opens one of them; none: it is over, and who waits
        for a newer step looks whether it made one."""
        namespace.steps.closing_steps = frozenset(steps)
        if not namespace.steps.closing_steps:
            self._wake(namespace.views)

    def _wake(self, views: Iterable[View]) -> None:
        self._outbox.woken.extend(request.future for view in views for request in view.awaited)

    @staticmethod
    def await_step(request: StepRequest) -> None:
        """Takes up a request for a newer step: whoever awaits it is woken when steps have changed, or its view has ended."""
        request.view.awaited.append(request)

    def end_step_request(self, request: StepRequest, error: ParamStoreError | None = None) -> None:
        """Ends a request for a newer step, which nobody awaits any more; or fails it with `error`."""
        if request in request.view.awaited:
            request.view.awaited.remove(request)
            request.error = error
            self._outbox.woken.append(request.future)

    @staticmethod
    def newer_step(request: StepRequest) -> StepRow | None:
        """The newest committed step, where it is newer than `request` says; None where it is not, or a rollback is dropping it."""
        view, steps = request.view, request.view.namespace.steps
        step = steps.committed_step
        if step is None or step in steps.closing_steps:
            return None
        newest = steps.ledger.step(step)
        if request.sequence is not None:
            return newest if newest.sequence != request.sequence else None
        stood = view.step if request.after is None else request.after
        is_lost = request.after is None and view.is_dropped
        return newest if stood is None or is_lost or step > stood else None

    @staticmethod
    def refuse_writer(namespace: NamespaceState) -> None:
        """Refuses the writer's leases, prefetches, pushes and applies until a rollback ends: the ledger is about to change."""
        namespace.writing.is_rolling_back = True

    @staticmethod
    def give_back(views: Iterable[View]) -> None:
        """Gives the views their steps back, which are dropped after all not."""
        for view in views:
            view.is_dropped = False

    @staticmethod
    def drop_readers(namespace: NamespaceState, steps: Iterable[int]) -> list[View]:
        """Takes these steps from their readers: their leases stay, their next acquire is refused. Returns those views."""
        lost = frozenset(steps)
        dropped = [view for view in namespace.views if view.step in lost and not view.is_dropped]
        for view in dropped:
            view.is_dropped = True
        return dropped
