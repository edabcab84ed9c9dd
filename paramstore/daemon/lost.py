"""What follows a request that came broken: it is refused, and so is what its client sent behind it, believing that it had happened.

A handle on which a push, an apply or an abort was lost takes no ordered request until an `Abort`, a `Rollback` or an
`InitializeBegin` sent after it has succeeded: else a commit would make a step durable that lacks what its writer thinks is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paramstore.daemon.handlers import ORDERED
from paramstore.engine.namespace import View
from paramstore.errors import ProtocolError, StepFailed
from paramstore.wire import messages as m
from paramstore.wire.codec import BrokenRequest

RELIED_ON = frozenset({m.Push, m.Apply, m.BeginApply, m.EndApply, m.Abort})
"""What a client that waits for no answer takes for done."""
STARTS_OVER = frozenset({m.Abort, m.Rollback, m.InitializeBegin})


class LostRequests:
    """Owner of what one session's broken requests have left. False while nothing was lost."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        """By handle."""
        self._ends: dict[int, int] = {}
        """The handle of each request under way that starts over, by its id."""

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def add(self, broken: BrokenRequest, error: ProtocolError, views: Mapping[int, View]) -> None:
        """views: those open, by handle; all that write have lost it where the request does not say which one it is of."""
        if broken.kind not in RELIED_ON:
            return
        name = broken.kind.__struct_config__.tag
        known = views.keys() & {broken.handle} or views.keys()
        lost = {handle for handle in known if views[handle].is_writer}
        self._reasons.update(dict.fromkeys(lost, f"request {broken.id} ({name}) came broken: {error}"))
        self._ends = {request_id: handle for request_id, handle in self._ends.items() if handle not in lost}

    def refusal_of(self, request: Any) -> StepFailed | None:
        """The answer to a request behind a lost one; None for one that is to be carried out."""
        reason = self._reasons.get(getattr(request, "handle", 0))
        if reason is None or type(request) not in ORDERED:
            return None
        if type(request) in STARTS_OVER:
            self._ends[request.id] = request.handle
            return None
        way_on = "abort() or rollback() is the way on, before the first commit initialize()"
        return StepFailed(f"{reason}; what was sent behind it is refused: {way_on}")

    def settle(self, request_id: int, *, is_done: bool) -> None:
        """The request is answered; one that starts over and is done ends the refusals on its handle."""
        handle = self._ends.pop(request_id, None)
        if handle is not None and is_done:
            self._reasons.pop(handle, None)
