"""The updater: initial values, gradient norms and the optimizer, over records that stream through a few slots.

`begin` marks, at the moment of the call, the records that the apply will change, so that a lease asked for later waits for them.
`apply` then takes them in an order that keeps volumes and cores busy at once (`planner/apply_order.py`). A record is updated in
place in its working slot; the new `param` version is made in the same pass where there is a slot for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import fsum, sqrt

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import Options
from paramstore.core.schema import Schema
from paramstore.engine.planner.apply_order import absent_ahead
from paramstore.engine.planner.planner import Update
from paramstore.engine.planner.waiting import await_change
from paramstore.engine.planner.working_copies import may_update
from paramstore.engine.records.access import Access
from paramstore.engine.records.cleaner import Cleaner
from paramstore.engine.tables.apply import Claimed, Claims, GradientRange
from paramstore.engine.tables.copies import WorkingCopy
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.arithmetic import cut_update, fill_initial, square_sum, update
from paramstore.engine.transfers.runner import CPU_LANE
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import CapacityError, ParamStoreError, StepFailed

Pending = Mapping[ExpertKey, tuple[GradientRange, ...]]
"""For each key the gradients of the ranks that pushed one, in rank order."""
NORM_PIECE_BYTES = 2 << 20
"""Bytes of gradients from which on a worker gets no more at once for their norm: handing it over costs as much as a small one."""
LOOKAHEAD_RECORDS = 4
"""Records loading or waiting beside those being updated: enough to hide a read behind an update."""


class Updater:
    """Runs one apply of a namespace at a time; the store keeps them in call order."""

    def __init__(
        self, transfers: Transfers, access: Access, cleaner: Cleaner, *, update_workers: int
    ) -> None:
        self._transfers = transfers
        self._access = access
        self._cleaner = cleaner
        self._update_workers = update_workers
        self._depth = update_workers + LOOKAHEAD_RECORDS

    def begin(self, namespace: NamespaceState, options: Options) -> Claimed:
        """Claims everything pending; from here on the writer sees the bytes that the apply will make."""
        with self._transfers.deciding() as planner:
            return planner.claims.begin(namespace, options)

    def give_up(self, namespace: NamespaceState, epoch: int, error: ParamStoreError) -> None:
        """Breaks the namespace for an apply that began in `epoch` and will never run, since its view is closed or fenced: so nobody
        waits for the bytes that it would have made."""
        if namespace.epoch == epoch:  # else a rollback has seen to it
            with self._transfers.deciding() as planner:
                planner.mark_broken(namespace, f"an apply was given up: {error}")

    def open(self, namespace: NamespaceState, options: Options, grad_scale: float) -> Claims:
        """Begins an apply whose gradients are still to come; `follow` runs it."""
        claims = Claims(options, grad_scale, is_open=True, outcome=asyncio.get_running_loop().create_future())
        with self._transfers.deciding() as planner:
            planner.claims.open(namespace, claims)
        return claims

    def claim(self, namespace: NamespaceState, claims: Claims, keys: Sequence[ExpertKey]) -> None:
        """Lets the open apply claim `keys`, whose gradients are all there, and begin to update them."""
        with self._transfers.deciding() as planner:
            planner.claims.claim(namespace, claims, keys)

    def close(self, namespace: NamespaceState, claims: Claims) -> None:
        """Closes the open apply, which claims everything pending; from here on the writer sees the bytes that it will make."""
        with self._transfers.deciding() as planner:
            planner.claims.close(namespace, claims, pipeline_slots=self._depth)

    def wake(self, namespace: NamespaceState) -> None:
        """Wakes those who wait for a change of the open apply."""
        with self._transfers.deciding() as planner:
            planner.claims.wake(namespace)

    def drop(self, namespace: NamespaceState, reason: str) -> None:
        """Gives up the open apply, if there is one. Where it has claimed a key the namespace is broken."""
        with self._transfers.deciding() as planner:
            planner.drop_apply(namespace, reason)

    async def follow(
        self, namespace: NamespaceState, claims: Claims, check: Callable[[], object], *, epoch: int
    ) -> dict[str, int]:
        """Runs an open apply to its end, which comes after it is closed; returns what `apply` does. It takes the turn when it
        claims its first key: that wakes it before the task of any later call starts. check: raises what keeps it from running then.
        epoch: the namespace's when the apply was opened."""
        while not claims.has_begun:
            await _changed(claims)
        async with namespace.writing.turn:
            if claims.error is not None:
                raise claims.error
            try:
                check()
            except ParamStoreError as error:
                if namespace.writing.open_apply is claims:
                    self.drop(namespace, str(error))
                self.give_up(namespace, epoch, error)
                raise
            if namespace.epoch != epoch:  # it was closed, and rolled back before its turn came
                raise StepFailed(f"apply on {namespace.name!r}: it was rolled back meanwhile")
            return await self._update_all(namespace, claims)

    async def apply(
        self, namespace: NamespaceState, claimed: Claimed, options: Options, *, grad_scale: float
    ) -> dict[str, int]:
        """Runs an apply: on return every record of `claimed` has had its optimizer step, and before it those that it missed. If
        that fails half-way the namespace is broken: raises StepFailed, and rollback is the way on."""
        return await self._update_all(namespace, Claims(options, grad_scale, claimed))

    async def _update_all(self, namespace: NamespaceState, claims: Claims) -> dict[str, int]:
        epoch = namespace.epoch
        before = namespace.stats.bytes_read, namespace.stats.bytes_written
        try:
            if not claims.is_open:  # an open apply reserves each record's extent when it comes to that record
                await self._reserve(namespace, claims.gradients)
            with self._transfers.deciding() as planner:
                planner.claims.begin_updates(namespace, claims, pipeline_slots=self._depth)
            wanted = self._depth if claims.is_open else max(1, len(claims.queue))
            depth = min(self._depth, wanted, _slot_count(namespace))
            await _all_or_first_error([self._update_some(namespace, epoch, claims) for _ in range(depth)])
        except ParamStoreError as error:
            self._break(namespace, epoch, claims, f"an apply failed: {error}")
            raise StepFailed(f"apply on {namespace.name!r} failed: {error}") from error
        except BaseException:
            self._break(namespace, epoch, claims, "an apply was interrupted")
            raise
        namespace.stats.applies += 1
        return {
            "records": sum(map(bool, claims.gradients.values())),
            "bytes_read": namespace.stats.bytes_read - before[0],
            "bytes_written": namespace.stats.bytes_written - before[1],
        }

    def _break(self, namespace: NamespaceState, epoch: int, claims: Claims, reason: str) -> None:
        if namespace.epoch != epoch:
            return  # a rollback has seen to it
        with self._transfers.deciding() as planner:
            planner.mark_broken(namespace, reason)
            if namespace.writing.open_apply is claims:
                planner.drop_apply(namespace, reason)

    async def _reserve(self, namespace: NamespaceState, keys: Collection[ExpertKey]) -> None:
        """Reserves an extent for every record; waits while space is about to come free."""
        while True:
            try:
                with self._transfers.deciding() as planner:
                    planner.reserve_extents(namespace, keys)
            except CapacityError:
                if not await self._cleaner.until_space(namespace):
                    raise
            else:
                return

    async def _update_some(self, namespace: NamespaceState, epoch: int, claims: Claims) -> None:
        while (key := await self._next(namespace, epoch, claims)) is not None:
            urgency = Urgency.PREFETCH if claims.is_open else Urgency.DEMAND  # below what a backward waits for
            working = await self._access.hold(namespace, key, urgency=urgency, spared=claims.awaited)
            await self._until_mine(namespace, working, epoch)
            is_shared = len(claims.queue) < self._update_workers
            await self._update_one(namespace, working, claims, is_shared=is_shared)
            absent = absent_ahead(claims.queue, namespace.residency.resident, depth=self._depth)
            self._cleaner.clean_ahead(namespace, absent, spared=claims.awaited)

    async def _next(self, namespace: NamespaceState, epoch: int, claims: Claims) -> ExpertKey | None:
        """Takes the key to update next; None when all are taken. In an open apply it waits for the next push, as long as the writer
        takes: the apply's end, a rollback and the daemon's end all end the wait."""
        while claims.error is None and (claims.queue or claims.is_open):
            if namespace.writing.stop_requests or namespace.epoch != epoch:
                raise StepFailed("another writer took over")
            with self._transfers.deciding() as planner:
                key = planner.claims.next_key(claims)
            if key is not None:
                return key
            await _changed(claims)
        if claims.error is not None:
            raise claims.error
        return None

    async def _until_mine(self, namespace: NamespaceState, working: WorkingCopy, epoch: int) -> None:
        """Waits until the update may start: other holders are done, and the write that a cut needs has landed."""
        try:
            while not self._may_start(namespace, working):
                if working.is_orphan or namespace.epoch != epoch:
                    raise StepFailed("the namespace was rolled back")
                if may_update(namespace, working):
                    if not await self._cleaner.until_space(namespace):
                        with self._transfers.deciding() as planner:
                            planner.reserve_extents(namespace, [working.key])  # says what is missing
                    continue  # somebody else may hold the slot after that wait
                if namespace.steps.is_cut(working):
                    with self._transfers.deciding() as planner:
                        planner.cuts.write(namespace, working)
                await self._access.changed(namespace, working)
        except BaseException:
            with self._transfers.deciding() as planner:
                planner.working.unhold(namespace, working)
            raise

    def _may_start(self, namespace: NamespaceState, working: WorkingCopy) -> bool:
        """Whether the update may begin now; if so the record has an extent again, as a write for a cut may have taken its first."""
        if not may_update(namespace, working):
            return False
        try:
            with self._transfers.deciding() as planner:
                planner.reserve_extents(namespace, [working.key])
        except CapacityError:
            return False
        return True

    async def _update_one(
        self, namespace: NamespaceState, working: WorkingCopy, claims: Claims, *, is_shared: bool
    ) -> None:
        """Updates one record. is_shared: too few records are left for one per worker, so several workers share this one."""
        urgency = Urgency.PREFETCH if claims.is_open else Urgency.DEMAND
        with self._transfers.deciding() as planner:
            planned = planner.plan_update(namespace, working, claims)
            updated = self._transfers.start_update(
                namespace, planned.copies, self._jobs(namespace, planned, is_shared=is_shared), urgency=urgency,
                settle=partial(self._settle, namespace, planned),
            )  # fmt: skip
        await updated

    def _jobs(self, namespace: NamespaceState, planned: Update, *, is_shared: bool) -> Sequence[Callable[[], object]]:
        """Makes the jobs of one update, which may run in any order."""
        claims, param = planned.claims, None
        if planned.copy is not None:
            param = namespace.memory.param.view(planned.copy.slot)
        job = partial(
            update, namespace.schema, self._image(namespace, planned.working), [each.view() for each in planned.gradients],
            options=claims.options if planned.gradients else None, optimizer_step=planned.optimizer_step,
            grad_scale=claims.grad_scale, param=param, missed=planned.missed, key=planned.working.key,
        )  # fmt: skip
        return [partial(job, spans=spans) for spans in cut_update(namespace.schema)] if is_shared else [job]

    def _settle(self, namespace: NamespaceState, planned: Update, error: ParamStoreError | None) -> None:
        with self._transfers.deciding() as planner:
            planner.settle_update(namespace, planned, error)

    @staticmethod
    def _image(namespace: NamespaceState, working: WorkingCopy) -> memoryview:
        assert working.slot is not None
        return namespace.memory.working.view(working.slot)

    async def norm(self, namespace: NamespaceState, pending: Pending) -> float:
        """Returns the L2 norm over `pending`, each key's gradient summed over its ranks."""
        jobs = [partial(_square_sums, namespace.schema, some) for some in _norm_pieces(pending)]
        sums = await asyncio.gather(*(self._transfers.runner.call(CPU_LANE, job) for job in jobs))
        return sqrt(fsum(chain.from_iterable(sums)))

    # --- initial values

    async def fill(self, namespace: NamespaceState, key: ExpertKey, initial: memoryview) -> None:
        """Takes one key's initial value. On return its write-back has begun, and `initial` is not needed any more."""
        namespace.keys.check([key], namespace=namespace.name)
        self._check_empty(namespace, key)
        await self._reserve(namespace, [key])
        self._check_empty(namespace, key)  # the same key may have come twice while we waited
        working = await self._access.hold(namespace, key, is_fill=True)
        job = partial(fill_initial, namespace.schema, initial, self._image(namespace, working))

        def settle(error: ParamStoreError | None) -> None:
            with self._transfers.deciding() as planner:
                planner.settle_fill(namespace, working, error)

        await self._transfers.start_update(namespace, [working], [job], urgency=Urgency.DEMAND, settle=settle)

    @staticmethod
    def _check_empty(namespace: NamespaceState, key: ExpertKey) -> None:
        working = namespace.residency.working[key]
        if not namespace.writing.is_initializing or working.identity is not None or working.slot is not None:
            raise StepFailed(f"{key} of {namespace.name!r} has its initial value already")


def _norm_pieces(pending: Pending) -> Iterator[list[list[memoryview]]]:
    """The gradients of all keys, in pieces for one worker each."""
    piece, piece_bytes = list[list[memoryview]](), 0
    for gradients in pending.values():
        piece.append([each.view() for each in gradients])
        piece_bytes += sum(each.length_bytes for each in gradients)
        if piece_bytes >= NORM_PIECE_BYTES:
            yield piece
            piece, piece_bytes = [], 0
    if piece:
        yield piece


def _square_sums(schema: Schema, piece: Sequence[Sequence[memoryview]]) -> list[float]:
    """The sum of squares of each key's gradient. Runs in a worker."""
    return [square_sum(schema, gradients) for gradients in piece]


async def _changed(claims: Claims) -> None:
    """Waits for the next change of an open apply."""
    future = asyncio.get_running_loop().create_future()
    await_change(claims.waiters, future)
    await future


def _slot_count(namespace: NamespaceState) -> int:
    return max(1, namespace.memory.working.slots.count)


async def _all_or_first_error(coroutines: list[Coroutine[object, object, None]]) -> None:
    """Runs all to their end; if one fails, the others stop at their next await, then its error is raised; bugs go before errors."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as failed:
        _, bugs = failed.split(ParamStoreError)
        raise bugs or failed.exceptions[0] from None
