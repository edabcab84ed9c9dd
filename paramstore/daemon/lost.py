"""The rules after a broken request: it is refused, and so is what its client sent behind it in the belief that it was done.

A handle on which a push, an apply or an abort was lost takes no ordered request until an `Abort`, a `Rollback` or an
`InitializeBegin` sent after it has succeeded: else a commit would make a step durable that lacks what its writer thinks is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paramstore.daemon.handlers import ORDERED
from paramstore.engine.tables.namespace import View
from paramstore.errors import ProtocolError, StepFailed
from paramstore.wire import messages as m
from paramstore.wire.codec import BrokenRequest

RELIED_ON = frozenset({m.Push, m.Apply, m.BeginApply, m.EndApply, m.Abort})
"""Requests that a client which does not wait for answers takes for done."""
STARTS_OVER = frozenset({m.Abort, m.Rollback, m.InitializeBegin})


class LostRequests:
    """Owner of what one session's broken requests have left behind."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        """Why a handle refuses requests, by handle."""
        self._ends: dict[int, int] = {}
        """Handle of each request under way that starts over, by the request's id."""

    def add(self, broken: BrokenRequest, error: ProtocolError, views: Mapping[int, View]) -> None:
        """Notes the loss of `broken`. views: the open ones, by handle. If its handle is unknown, all that write have lost it."""
        if broken.kind not in RELIED_ON:
            return
        name = broken.kind.__struct_config__.tag
        known = views.keys() & {broken.handle} or views.keys()
        lost = {handle for handle in known if views[handle].is_writer}
        self._reasons.update(dict.fromkeys(lost, f"request {broken.id} ({name}) came broken: {error}"))
        self._ends = {request_id: handle for request_id, handle in self._ends.items() if handle not in lost}

    def refusal_of(self, request: Any) -> StepFailed | None:
        """Gives the error for a request sent behind a lost one, or None if the request is to be carried out."""
        reason = self._reasons.get(getattr(request, "handle", 0))
        if reason is None or type(request) not in ORDERED:
            return None
        if type(request) in STARTS_OVER:
            self._ends[request.id] = request.handle
            return None
        way_on = "abort() or rollback() is the way on, before the first commit initialize()"
        return StepFailed(f"{reason}; what was sent behind it is refused: {way_on}")

    def settle(self, request_id: int, *, is_done: bool) -> None:
        """Notes that the request is answered. If it starts over and has succeeded, its handle refuses no more."""
        handle = self._ends.pop(request_id, None)
        if handle is not None and is_done:
            self._reasons.pop(handle, None)
