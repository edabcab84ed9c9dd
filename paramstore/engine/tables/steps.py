"""The planner's table of the steps of one namespace. Plain data with lookups; the planner is the only writer."""

from __future__ import annotations

from collections.abc import Iterable

from paramstore.core.key import ExpertKey
from paramstore.core.location import Located
from paramstore.engine.tables.copies import Cut, WorkingCopy
from paramstore.storage.catalog.ledger import Ledger


class StepTable:
    """The steps of one namespace, and what the next one is made of."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.sequence = ledger.namespace.sequence
        """Number of the newest commit or prepare, whether or not it was published."""
        self.changed: list[WorkingCopy] = []
        """Those whose newest identity no step has published, and which are in no cut: the next commit's."""
        self.cut: Cut | None = None
        self.cut_waiters: list[object] = []
        """Futures of those who wait for the commit under way to end."""
        self.preparing: int | None = None
        """The step of a `prepare` that the writer called and that is not over."""
        self.closing_steps: frozenset[int] = frozenset()
        """Steps that the transaction under way drops: no reader may open them any more."""

    @property
    def committed_step(self) -> int | None:
        return self.ledger.committed_step

    @property
    def prepared_step(self) -> int | None:
        """The step that is prepared, or is being prepared: records change no more before it is finalized or gone."""
        return self.ledger.prepared_step if self.preparing is None else self.preparing

    @property
    def standing_step(self) -> int | None:
        """The newest step that a reader may open: not one that a transaction under way drops."""
        return max((step for step in self.ledger.steps() if step not in self.closing_steps), default=None)

    @property
    def applies(self) -> int:
        """Number of applies that the newest step covers."""
        newest = self.ledger.newest
        return 0 if newest is None else newest.applies

    def newest(self, key: ExpertKey) -> Located | None:
        """The record of `key` at the newest step."""
        newest = self.ledger.newest
        return self.ledger.at(key, newest.step) if newest is not None else None

    def fresh_working(self, keys: Iterable[ExpertKey]) -> dict[ExpertKey, WorkingCopy]:
        """Working copies of `keys` as the newest step has them, none resident."""
        located = {key: self.newest(key) for key in keys}
        return {key: WorkingCopy(key, record.identity if record is not None else None) for key, record in located.items()}

    def note_change(self, working: WorkingCopy) -> None:
        """Notes that the next commit is to publish its newest identity."""
        if working.publish_in != self.sequence + 1:
            working.publish_in = self.sequence + 1
            self.changed.append(working)

    def is_cut(self, working: WorkingCopy) -> bool:
        """Whether a commit waits for this record: it is not updated before the cut has it, by its write or as it is."""
        return self.cut is not None and self.cut.awaits(working)
