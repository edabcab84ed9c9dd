"""Followers: views whose clients wait for the next committed step and move to it, while a writer goes on.

A wait is a request that stands in its view until it is answered: the planner wakes it when steps have changed, and it looks for
itself. So a follower that is slower than the commits is told of the newest step, and skips those between.
"""

from __future__ import annotations

import asyncio

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.slices import slices
from paramstore.engine.planner.waiting import await_request
from paramstore.engine.tables.namespace import NamespaceState, StepRequest, View, fenced_error
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import LeaseError, TicketCancelled, WaitTimeout


class Followers:
    """Waits for newer steps. The requests stand in `View.awaited`."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def begin(self, view: View, after: int | None, sequence: int | None) -> StepRequest:
        """Makes a request for a step that is newer than these say, as `AwaitStep` defines it; to be awaited by `wait`."""
        request = StepRequest(view, after, sequence)
        with self._transfers.deciding() as planner:
            planner.views.await_step(request)
        return request

    async def wait(self, request: StepRequest, timeout_s: float) -> dict[str, int]:
        """Waits for a newer step and returns its number and the sequence of its commit; the request is over then, whatever came.

        Raises WaitTimeout, TicketCancelled, LeaseError where the view was closed, WriterFenced.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        try:
            while True:
                _check(request)
                with self._transfers.deciding() as planner:
                    newest = planner.views.newer_step(request)
                if newest is not None:
                    return {"step": newest.step, "sequence": newest.sequence}
                if loop.time() >= deadline_s:
                    raise WaitTimeout(_too_late(request, timeout_s))
                changed = loop.create_future()
                await_request(request, changed)
                await asyncio.wait([changed], timeout=deadline_s - loop.time())
        finally:
            with self._transfers.deciding() as planner:
                planner.views.end_step_request(request)

    def cancel(self, request: StepRequest) -> None:
        """Ends the wait with TicketCancelled, unless it is over."""
        with self._transfers.deciding() as planner:
            planner.views.end_step_request(request, TicketCancelled("the wait for a step was cancelled"))


async def count_changes(namespace: NamespaceState, *, before: int | None, step: int) -> dict[str, int]:
    """Counts the keys that have another identity at `step` than at `before`, a step below, and the bytes of a `param` copy of each.

    before: None counts every key. A step that newer commits have dropped will do: where its own row of a key is gone, there is a
    later one, and the key has changed.
    """
    ledger, changed = namespace.steps.ledger, 0
    former, latter = None if before is None else ledger.find(before), ledger.find(step)
    if before is None:
        changed = len(namespace.keys)
    elif namespace.is_exact and former is not None and latter is not None:  # an apply is a step of every record
        changed = len(namespace.keys) if former.applies != latter.applies else 0
    elif before != step:
        for keys in slices(namespace.keys if former is None else ledger.layered):
            changed += sum(_seen(namespace, key, before) != _seen(namespace, key, step) for key in keys)
            await asyncio.sleep(0)
    return {"step": step, "keys": changed, "bytes": changed * namespace.schema.part("param").image_bytes}


def _seen(namespace: NamespaceState, key: ExpertKey, step: int) -> Identity | None:
    located = namespace.steps.ledger.at(key, step)
    return None if located is None else namespace.seen_at(located, step)


def _check(request: StepRequest) -> None:
    """Raises the error with which the request has ended, if it has."""
    view = request.view
    if request.error is not None:
        raise request.error
    if view.is_closed:
        raise LeaseError(f"namespace {view.namespace.name!r} was closed")
    if view.is_fenced:
        raise fenced_error(view.namespace)


def _too_late(request: StepRequest, timeout_s: float) -> str:
    name, newest = request.view.namespace.name, request.view.namespace.steps.committed_step
    stood = "that is not committed yet" if newest is None else f"after step {newest if request.after is None else request.after}"
    return f"no step of {name!r} {stood} within {timeout_s:g} s; the newest is {newest}"
