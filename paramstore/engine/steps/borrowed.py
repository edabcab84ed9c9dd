"""Which older steps stay for readers who stand on them: as many, the newest of them, as there is room for that nobody else is
entitled to. What stays on the volumes, in the catalog and in note slots for such a step is borrowed. It is given back at the
commit after which somebody would lack it, or to whoever lacks room before that (`History.find_room`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from paramstore.core.key import ExpertKey
from paramstore.engine.steps.transactions import Transactions
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.storage.catalog.base import STEP_ROWS_BOUND
from paramstore.storage.space.extents import Space
from paramstore.storage.space.note_slots import NoteSlots

NOTE_SLOTS_LEFT = 0.5
"""Share of the note slots that older steps leave to commits, prepared steps and snapshots."""


@dataclass(frozen=True, slots=True)
class Older:
    """Older steps that are not entitled to room, oldest first. rows: how many records stay on the volumes for each of them until it
    goes. unseen: how many go in any case. going: how many steps go in any case."""

    steps: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    unseen: int = 0
    going: int = 0
    is_in_catalog: bool = True
    """Whether the catalog has room for all of their rows."""


class Borrowed:
    """Counts what older steps take, and chooses which of them go."""

    def __init__(
        self, space: Space, note_slots: NoteSlots, transactions: Transactions, namespaces: Mapping[str, NamespaceState], *,
        kept_rows: Callable[[], int], slack_bytes: Callable[[], int],
    ) -> None:  # fmt: skip
        """kept_rows: how many rows of the catalog all namespaces are entitled to, or have borrowed. slack_bytes: how much of the
        volumes may be free and of no use to any of them."""
        self._space = space
        self._note_slots = note_slots
        self._transactions = transactions
        self._namespaces = namespaces
        self._kept_rows = kept_rows
        self._slack_bytes = slack_bytes

    async def count(
        self, namespace: NamespaceState, published: int, changed: Collection[ExpertKey], held_steps: Collection[int]
    ) -> Older:
        """Counts what readers on `held_steps` keep once `published` is committed with `changed` records. Raises ParamStoreError."""
        ledger = namespace.steps.ledger
        if not (steps := ledger.borrowing_after(published, held_steps)):
            return Older()
        going = len(frozenset(ledger.steps()) - ledger.visible_steps(held_steps, published=published))
        count = partial(ledger.rows_until, published, changed, held_steps, steps)
        kept_rows = self._kept_rows() + len(steps) * STEP_ROWS_BOUND  # with what it has borrowed up to now
        (rows, unseen), has_room = await self._transactions.look(
            namespace, count, room_of=lambda found: kept_rows + sum(found[0])
        )
        return Older(tuple(steps), tuple(rows), unseen, going, is_in_catalog=has_room)

    def choose(self, namespace: NamespaceState, older: Older) -> tuple[int, ...]:
        """Chooses which steps of `older` go, and notes what the others have borrowed. Returns those that go."""
        if not older.steps:
            return ()
        record_bytes = namespace.schema.record_bytes
        kept, freed = sum(older.rows), older.unseen
        for count, rows in enumerate((*older.rows, 0)):
            is_last = count == len(older.steps)
            slots = self._note_slots.free_count + older.going + count >= NOTE_SLOTS_LEFT * self._note_slots.count
            fits = self._space.may_borrow(
                namespace.name, kept * record_bytes, freed_bytes=freed * record_bytes, slack_bytes=self._slack_bytes()
            )
            if is_last or (older.is_in_catalog and slots and fits):
                break
            kept, freed = kept - rows, freed + rows
        borrowed = max(kept * record_bytes, self._space.borrowed_bytes(namespace.name))
        self._space.borrow(namespace.name, borrowed)  # less only when the transaction has happened
        return older.steps[:count]

    def borrowers(self) -> list[NamespaceState]:
        """The namespaces that have borrowed room."""
        return [namespace for namespace in self._namespaces.values() if namespace.steps.ledger.borrowing_steps]

    def settle(self, namespace: NamespaceState) -> None:
        """Notes what a namespace has borrowed, as its ledger says, which is up to date again."""
        self._space.borrow(namespace.name, namespace.steps.ledger.borrowed_rows * namespace.schema.record_bytes)
