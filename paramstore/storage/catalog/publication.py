"""A planned change of a namespace's rows and steps: what the catalog makes durable, and how memory changes afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent
from paramstore.storage.catalog.base import Change, NamespaceRow, Row, StepRow


@dataclass(frozen=True, slots=True)
class Publication:
    """One planned change of a namespace. namespace: its row as it will be.

    put_rows, drop_rows, freed: emptied by whoever has settled it, in slices.
    freed: extents that nobody sees any more once this is durable (reads under way may still pin them).
    freed_note_slots: note slots of the dropped steps.
    """

    namespace: NamespaceRow
    put_rows: list[tuple[str, ExpertKey, Row]]
    drop_rows: list[tuple[str, ExpertKey, int]]
    put_steps: tuple[tuple[str, StepRow], ...]
    drop_steps: tuple[tuple[str, int], ...]
    freed: list[Extent]
    freed_note_slots: tuple[int, ...]
    rows_after: Mapping[ExpertKey, list[Row]] = field(repr=False)
    """Row lists that `Ledger.settling` puts in place; made ahead, so that settling a large commit is short."""
    keys_gone: frozenset[ExpertKey] = field(repr=False)
    keys_layered: frozenset[ExpertKey] = field(repr=False)
    borrowed_rows: int
    """How many rows then have borrowed their room; see `Ledger`."""

    def change(self) -> Change:
        """The transaction that makes it durable."""
        return Change(
            put_namespaces=(self.namespace,),
            put_rows=tuple(self.put_rows),
            drop_rows=tuple(self.drop_rows),
            put_steps=self.put_steps,
            drop_steps=self.drop_steps,
        )


def publication_of(
    namespace: NamespaceRow, *, added: Mapping[ExpertKey, Row], added_steps: Iterable[StepRow],
    dropped: Sequence[tuple[ExpertKey, Row]], dropped_steps: Sequence[StepRow], rows_after: Mapping[ExpertKey, list[Row]],
    borrowed_rows: int,
) -> Publication:  # fmt: skip
    """Makes a publication. rows_after: those of every key that has several rows before or after, or whose rows change."""
    name = namespace.name
    return Publication(
        namespace=namespace,
        put_rows=[(name, key, row) for key, row in added.items()],
        drop_rows=[(name, key, row.first_step) for key, row in dropped],
        put_steps=tuple((name, row) for row in added_steps),
        drop_steps=tuple((name, row.step) for row in dropped_steps),
        freed=[row.located.extent for _, row in dropped],
        freed_note_slots=tuple(row.note_slot for row in dropped_steps),
        rows_after=rows_after,
        keys_gone=frozenset(key for key, rows in rows_after.items() if not rows),
        keys_layered=frozenset(key for key, rows in rows_after.items() if len(rows) > 1),
        borrowed_rows=borrowed_rows,
    )
