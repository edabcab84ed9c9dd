"""The planner's decisions, which the store carries out: moves to start, urgencies to raise, requests that are finished.

The planner puts all its decisions into its `Outbox`, which is taken when a block of `Transfers.deciding` ends. So a
decision is complete, and all tables consistent, before the first byte moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paramstore.core.location import Located
from paramstore.engine.tables.copies import ParamCopy, Waiter, WorkingCopy
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.requests import Urgency


class MoveKind(StrEnum):
    """The kinds of moves, by source and target."""

    LOAD_PARAM = "load_param"
    """Extent to `param` slot; cast on the way where `param` is not stored as such."""
    MATERIALISE = "materialise"
    """Working slot to `param` slot."""
    ADVANCE = "advance"
    """A whole record, from its extent or working slot, through a buffer in which it makes its missed steps, to a `param` slot."""
    LOAD_WORKING = "load_working"
    """Extent to working slot."""
    WRITE = "write"
    """Working slot to a fresh extent."""
    UPDATE = "update"
    """New bytes into a working slot: an optimizer's, or initial values."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """One planned copy of bytes. subject: the copy whose state changes when the move is done. located: the extent read from, or
    written to. source: the working copy whose slot is read. urgency: what it was planned with, which may rise.
    """

    kind: MoveKind
    namespace: NamespaceState
    subject: ParamCopy | WorkingCopy
    urgency: Urgency
    located: Located | None = None
    source: WorkingCopy | None = None
    deadline_s: float | None = None


class Outbox:
    """Decisions not yet carried out."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.promoted: list[ParamCopy | WorkingCopy] = []
        """Copies whose moves, where they have one under way, are raised to DEMAND."""
        self.finished: list[Waiter] = []
        self.woken: list[object] = []
        """Futures to wake, of those who wait for a change: of a working copy, an apply, a commit, the space on volumes."""

    def take(self) -> Outbox:
        """Returns its content in a box of its own, and is empty then."""
        taken = Outbox()
        taken.moves, self.moves = self.moves, taken.moves
        taken.promoted, self.promoted = self.promoted, taken.promoted
        taken.finished, self.finished = self.finished, taken.finished
        taken.woken, self.woken = self.woken, taken.woken
        return taken

    @property
    def is_empty(self) -> bool:
        return not (self.moves or self.promoted or self.finished or self.woken)
