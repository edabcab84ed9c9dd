"""The writer's gradients, and the applies that consume them: plain ones, and *open* ones, which begin before these are there.

An open apply claims a key when every rank has pushed its last gradient of it, and all other keys when it is closed; from its first
claim on it has the namespace's turn. It makes bit for bit the records that a plain apply of the same gradients makes. A claim
cannot be undone: an open apply that is given up after one leaves the namespace broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import Options
from paramstore.core.placement import ranks_named
from paramstore.engine.planner.gradients import add_pending, drop_pending, end_layer, note_last
from paramstore.engine.planner.permission import check_changing, check_pushing, check_unclaimed, check_writer
from paramstore.engine.planner.waiting import await_change
from paramstore.engine.records.update import Updater
from paramstore.engine.tables.apply import Claims, GradientRange, UploadMemory
from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore.errors import ParamStoreError, ProtocolError, SchemaMismatch, StepFailed, StepMismatch, StepOutOfOrder, WaitTimeout


class Applies:
    """Takes pushed gradients and starts applies; part of the store, on the event loop."""

    def __init__(self, updater: Updater) -> None:
        self._updater = updater

    def push(self, view: View, entries: Sequence[tuple[ExpertKey, UploadMemory, int]], *, is_last: bool = False) -> None:
        """Makes the gradients at these places pending: all of them, or none and an error.

        is_last: an apply is open, and the view's rank pushes no more for these keys before it is closed. A key that has a pending
        gradient of this rank is given with that gradient's place. The apply claims a key when all ranks have pushed their last.
        """
        namespace = check_pushing(view)
        if not namespace.is_trainable():
            raise SchemaMismatch(f"namespace {namespace.name!r} has a param schema: it takes no gradients")
        namespace.keys.check((key for key, _, _ in entries), namespace=namespace.name)
        length_bytes = namespace.schema.gradient_bytes
        ranges = {key: GradientRange(memory, offset, length_bytes, view.rank) for key, memory, offset in entries}
        claims = namespace.writing.open_apply
        if claims is not None or is_last:
            _check_last(namespace, ranges, rank=view.rank, is_last=is_last)
        _check_entries(namespace, entries, ranges, rank=view.rank, is_last=is_last)
        add_pending(namespace, ranges)
        if claims is not None and is_last:
            self._updater.claim(namespace, claims, note_last(view, claims, ranges))

    def end_layers(self, view: View, layers: Iterable[int]) -> None:
        """Notes that the view's rank pushes no more gradients of `layers` before the open apply is closed; the apply claims the
        pending keys that waited for that. Raises UnknownKey, StepOutOfOrder where none is open; then nothing has changed."""
        namespace = check_pushing(view)
        claims = _open_claims(namespace, "end_layers")
        ended = dict.fromkeys(layers)
        namespace.keys.check(((layer, 0) for layer in ended), namespace=namespace.name)
        self._end(view, claims, ended)

    def _end(self, view: View, claims: Claims, layers: Iterable[int]) -> None:
        for layer in layers:
            self._updater.claim(view.namespace, claims, end_layer(view, claims, layer))

    def note_call(self, view: View, what: str) -> None:
        """Notes that the view's rank has made the collective call `what`: it pushes nothing before all ranks have made it. Wakes
        those who wait for room, which may depend on this rank's pushes. "end_apply" also ends every layer for this rank."""
        claims = view.namespace.writing.open_apply
        if claims is None:
            return
        if what == "end_apply":
            self._end(view, claims, view.namespace.keys.layers)
        self._updater.wake(view.namespace)

    async def await_room(self, view: View, keys: Sequence[ExpertKey], timeout_s: float) -> list[ExpertKey]:
        """Waits until the open apply has read the gradients of at least one of `keys`, which this rank has pushed, for the last
        time. Returns all such keys: their places in the upload area are free. timeout_s: 0 returns what there is without waiting.

        Raises WaitTimeout naming what keeps the gradients from being read, StepMismatch where that is a rank whose collective call
        waits for this one, StepOutOfOrder where no apply is open, and the error with which the open apply ended.
        """
        claims = _open_claims(check_writer(view), "await_room")
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while not (read := [key for key in keys if key in claims.read]) and timeout_s > 0:
            if loop.time() >= deadline_s:
                raise WaitTimeout(_no_room(view, claims, keys))
            _check_awaitable(view, claims, keys)
            changed = loop.create_future()
            await_change(claims.room_waiters, changed)
            await asyncio.wait([changed], timeout=deadline_s - loop.time())
            check_writer(view)
            if claims.error is not None:
                raise claims.error
        return read

    def norm(self, view: View) -> Coroutine[Any, Any, float]:
        """Returns a coroutine of the L2 norm over the gradients that are pending at the moment of the call."""
        namespace = check_writer(view)
        check_unclaimed(namespace, what="gradient_norm")
        return self._updater.norm(namespace, dict(namespace.writing.pending))

    def apply(self, view: View, options: Options, grad_scale: float) -> Coroutine[Any, Any, dict[str, int]]:
        """Claims what is pending now; the coroutine then updates it in the namespace's turn. Raises StepPrepared, SchemaMismatch;
        then all is still pending."""
        namespace = check_changing(view)
        namespace.schema.check_options(options)
        pending, epoch = self._updater.begin(namespace, options), namespace.epoch

        async def run() -> dict[str, int]:
            async with namespace.writing.turn:
                try:
                    check_writer(view)
                except ParamStoreError as error:
                    self._updater.give_up(namespace, epoch, error)
                    raise
                if namespace.epoch != epoch:  # what it took, and the steps that it counts from, are gone
                    raise StepFailed(f"apply on {namespace.name!r}: it was rolled back meanwhile")
                return await self._updater.apply(namespace, pending, options, grad_scale=grad_scale)

        return run()

    def begin(self, view: View, options: Options, grad_scale: float) -> Coroutine[Any, Any, dict[str, int]]:
        """Opens an apply before its gradients are there. It updates a key as soon as all ranks have pushed their last gradient of
        it, and ends some time after `end_apply`. Raises StepPrepared, SchemaMismatch, StepOutOfOrder where one is open."""
        namespace = check_changing(view)
        namespace.schema.check_options(options)
        claims, epoch = self._updater.open(namespace, options, grad_scale), namespace.epoch
        outcome = claims.outcome
        assert isinstance(outcome, asyncio.Future)

        async def run() -> dict[str, int]:
            try:
                result = await self._updater.follow(namespace, claims, partial(check_writer, view), epoch=epoch)
            except BaseException as error:
                told = error if isinstance(error, ParamStoreError) else StepFailed(f"apply on {namespace.name!r}: {error!r}")
                outcome.set_result(told)
                raise
            outcome.set_result(result)
            return result

        return run()

    def end(self, view: View) -> Coroutine[Any, Any, dict[str, int]]:
        """Closes the open apply, which claims what is pending now; returns a coroutine of the apply's result. Raises StepOutOfOrder
        if none is open, StepFailed."""
        namespace = check_writer(view)
        claims = _open_claims(namespace, "end_apply")
        self._updater.close(namespace, claims)
        outcome = claims.outcome
        assert isinstance(outcome, asyncio.Future)

        async def wait() -> dict[str, int]:
            result: dict[str, int] | ParamStoreError = await asyncio.shield(outcome)
            if isinstance(result, ParamStoreError):
                raise result
            return result

        return wait()

    def abort(self, view: View) -> int:
        """Drops pending gradients and gives up the open apply, if there is one; returns how many keys had gradients pending. Raises
        StepFailed if that apply had claimed a key: rollback is the way on."""
        namespace = check_writer(view)
        count = drop_pending(namespace)
        self._updater.drop(namespace, "abort")
        check_writer(view)
        return count

    def leave(self, view: View, reason: str) -> None:
        """Gives up the open apply, if there is one: the view is leaving, and its gradients go with it."""
        if view.group is not None and view.group is view.namespace.writing.group:
            self._updater.drop(view.namespace, f"rank {view.rank} {reason}" if view.is_ranked else f"its writer {reason}")


def _open_claims(namespace: NamespaceState, what: str) -> Claims:
    """Returns the open apply. Raises StepOutOfOrder where there is none."""
    if namespace.writing.open_apply is None:
        raise StepOutOfOrder(f"{what} on {namespace.name!r}: no apply is open: begin_apply opens one")
    return namespace.writing.open_apply


def _check_entries(
    namespace: NamespaceState, entries: Sequence[object], ranges: Mapping[ExpertKey, GradientRange], *, rank: int, is_last: bool
) -> None:
    """Raises ProtocolError for a key that is named twice or already has a pending gradient of this rank (a last gradient may be
    that same one), StepFailed for a key without a value."""
    pending = namespace.writing.pending
    has_some = (
        key for key, pushed in ranges.items()
        if any(other.rank == rank and not (is_last and other == pushed) for other in pending.get(key, ()))
    )  # fmt: skip
    if len(ranges) != len(entries) or next(has_some, None) is not None:
        raise ProtocolError("a key was pushed that has a pending gradient; a client adds to it in place")
    for key in ranges:
        if namespace.residency.working[key].target is None:
            raise StepFailed(f"{key} of {namespace.name!r} has no value yet: call initialize")


def _check_last(namespace: NamespaceState, keys: Iterable[ExpertKey], *, rank: int, is_last: bool) -> None:
    """Raises StepOutOfOrder for a last gradient while no apply is open, and for any gradient after a last one."""
    claims = _open_claims(namespace, "push of last gradients")
    for key in keys:
        if rank in claims.done_ranks(key):
            raise StepOutOfOrder(
                f"push on {namespace.name!r}: {key} was pushed already since begin_apply, or its layer ended, and its update may "
                "have begun; "
                "push what comes before the last gradient of a key before begin_apply"
            )


def _no_room(view: View, claims: Claims, keys: Sequence[ExpertKey]) -> str:
    """The message that says why none of `keys` was read in time."""
    due, what = _due(view, claims, keys), f"push on {view.namespace.name!r}: no room in time"
    if not due:
        return f"{what}: {len(keys)} updates are under way, from {keys[0]} on; raise wait_timeout_s"
    missing = ranks_named(tuple(sorted(set().union(*due.values()))))
    return f"{what}: {len(due)} keys, from {next(iter(due))} on, wait for {missing} to push them or end their layers"


def _due(view: View, claims: Claims, keys: Iterable[ExpertKey]) -> dict[ExpertKey, set[int]]:
    """For each of `keys` that the open apply has not claimed, the ranks that may still push gradients of it."""
    assert view.group is not None
    everyone = set(range(view.group.world_size))
    return {key: everyone - claims.done_ranks(key) for key in keys if key not in claims.gradients}


def _check_awaitable(view: View, claims: Claims, keys: Sequence[ExpertKey]) -> None:
    """Raises StepMismatch where waiting would be for ever: each of `keys` waits for a rank whose call waits for this one."""
    group = view.group
    assert group is not None
    if not group.waiting:
        return
    waiting, due = set(group.waiting), _due(view, claims, keys)
    if len(due) == len(keys) and all(ranks & waiting for ranks in due.values()):
        missing = ranks_named(tuple(sorted(set().union(*due.values()) & waiting)))
        raise StepMismatch(
            f"push on {view.namespace.name!r}: no room will come: {missing} made a collective call before pushing {keys[0]} or "
            "ending its layer, and waits for this rank to make the same"
        )
