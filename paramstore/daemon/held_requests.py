"""Requests of one session that wait behind a collective call. What a rank asks for after such a call takes effect after it, so
it is held back, in order, until the call has begun or was refused. A session without ranks never holds anything.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from paramstore.core.placement import ranks_named
from paramstore.engine.tables.namespace import View
from paramstore.errors import ParamStoreError, TicketCancelled, WaitTimeout
from paramstore.wire import messages as m


@dataclass(slots=True, eq=False)
class _Held:
    request: Any
    deadline_s: float | None
    """Latest time at which a lease may be granted; None for other requests."""
    timer: asyncio.TimerHandle | None


class HeldRequests:
    """Owner of the requests held back. run: carries one out; fail: tells the client of one that is never carried out."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, run: Callable[[Any], None], fail: Callable[[int, ParamStoreError], None]
    ) -> None:
        self._loop = loop
        self._run = run
        self._fail = fail
        self._queues: dict[View, deque[_Held]] = {}
        self.by_id: dict[int, tuple[View, _Held]] = {}
        """Requests held back, by their id."""
        self._going_on: View | None = None
        """View whose requests are being carried out."""

    def stops(self, view: View) -> bool:
        """Whether a request of `view`, one of several ranks, has to wait: because its own call waits, or an earlier request."""
        return _is_calling(view) or (view in self._queues and view is not self._going_on)

    def add(self, view: View, request: Any) -> None:
        """Holds `request` back; a lease request for no longer than its own timeout."""
        held = _Held(request, None, None)
        if isinstance(request, m.Acquire):
            held.deadline_s = self._loop.time() + request.timeout_s
            held.timer = self._loop.call_later(request.timeout_s, self._is_late, view, held)
        self._queues.setdefault(view, deque()).append(held)
        self.by_id[request.id] = view, held

    def go_on(self, view: View) -> None:
        """Carries out the requests held for `view`, up to the next call that waits for other ranks."""
        queue = self._queues.get(view)
        self._going_on = view
        try:
            while queue and not _is_calling(view):
                held = queue.popleft()
                self._drop(held)
                if held.deadline_s is not None:
                    left_s = max(0.0, held.deadline_s - self._loop.time())
                    held.request = msgspec.structs.replace(held.request, timeout_s=left_s)
                self._run(held.request)
        finally:
            self._going_on = None
        if not queue:
            self._queues.pop(view, None)

    def cancel(self, request_id: int) -> bool:
        """Ends a held lease or prefetch with TicketCancelled. Returns False if none of that id is held."""
        view, held = self.by_id.get(request_id, (None, None))
        if view is None or held is None or not isinstance(held.request, m.Acquire | m.Prefetch):
            return False
        self._end(view, held, TicketCancelled("the request was cancelled"))
        return True

    def clear(self) -> None:
        """Forgets all held requests: the session is over, and nobody is to be answered."""
        for _, held in self.by_id.values():
            if held.timer is not None:
                held.timer.cancel()
        self.by_id.clear()
        self._queues.clear()

    def _is_late(self, view: View, held: _Held) -> None:
        group = view.group
        assert group is not None
        assert group.collective is not None
        lease = f"lease of {len(held.request.keys)} keys of {view.namespace.name!r}"
        why = f"it waits for rank {view.rank}'s own call before it, and that for {ranks_named(group.collective.missing)}"
        self._end(view, held, WaitTimeout(f"{lease}: {why}"))

    def _end(self, view: View, held: _Held, error: ParamStoreError) -> None:
        self._queues[view].remove(held)
        self._drop(held)
        self._fail(held.request.id, error)

    def _drop(self, held: _Held) -> None:
        del self.by_id[held.request.id]
        if held.timer is not None:
            held.timer.cancel()


def _is_calling(view: View) -> bool:
    """Whether the rank of `view` has a call that waits for the others."""
    return view.group is not None and not view.is_closed and view.rank in view.group.waiting
