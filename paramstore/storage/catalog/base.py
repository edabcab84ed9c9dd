"""The durable map: which namespaces exist, which record is in force at which step, which volumes belong to the store.

Rows are (namespace, layer, expert, first step) -> Located; in force at step s is a key's newest row with first_step <= s.
The whole catalog is read into `Contents` at open and afterwards only written: one `Change` is one durable transaction.
All calls are made on one thread, never the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paramstore.core.key import ExpertKey
from paramstore.core.location import Located

DRAFT_STEP = -1
"""The step of a namespace's *draft*: durable values of an initialization that is not over. It is below every step that can be
opened, and nobody opens it; the first commit takes its place. Its rows begin at this step, and stay in force after that commit."""


class Row(NamedTuple):
    """One record of a key: `located` is in force from `first_step` until the key's next row."""

    first_step: int
    located: Located


STEP_ROWS_BOUND = 320
"""Size bound of a step's row, with the longest `extra` and log, counted in rows of records."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step: committed, prepared or the draft. note_slot: where its commit note lies on every volume. applies: how many applies
    it covers (`last_apply` of a record's header counts in them). is_snapshot: it stays until the snapshot is dropped. is_prepared:
    durable, above all others, not committed yet. log: `storage.format.apply_log.pack_log` of the applies that its records may have
    missed; empty where records miss nothing.
    """

    step: int
    sequence: int
    note_slot: int
    record_count: int
    extra: bytes
    applies: int = 0
    is_snapshot: bool = False
    is_prepared: bool = False
    log: bytes = b""


@dataclass(frozen=True, slots=True)
class NamespaceRow:
    """One namespace. schema: a description of `core.schema.Schema`. epoch and sequence never decrease.

    epoch_bounds: for every earlier epoch, the last sequence that still counts (a rollback sets it).
    applies: repeats the newest step's, which is the one that counts; format 1 has it in both rows.
    """

    name: str
    schema: dict[str, object]
    layers: tuple[int, ...]
    experts: int
    epoch: int
    sequence: int
    epoch_bounds: tuple[tuple[int, int], ...] = ()
    applies: int = 0


@dataclass(frozen=True, slots=True)
class VolumeRow:
    """One volume. written_bytes: offset below which every block has been written once (write-back is twice as fast there).

    bytes_written: all bytes written to it over the store's life, zero-fill included. place: its directory, for messages. Both
    are recorded now and then: a crash loses what came after.
    """

    index: int
    uuid: bytes
    size_bytes: int
    written_bytes: int
    bytes_written: int = 0
    place: str = ""


@dataclass(slots=True)
class NamespaceContents:
    """All that the catalog holds of one namespace. rows: those of each key, oldest first. steps: by their number."""

    namespace: NamespaceRow
    rows: dict[ExpertKey, list[Row]] = field(default_factory=dict)
    steps: dict[int, StepRow] = field(default_factory=dict)


@dataclass(slots=True)
class Contents:
    """The whole catalog, as read at open."""

    store_uuid: bytes
    namespaces: dict[str, NamespaceContents] = field(default_factory=dict)
    volumes: dict[int, VolumeRow] = field(default_factory=dict)

    def note_slots(self) -> Iterator[int]:
        """The note slots of all steps of all namespaces."""
        return (row.note_slot for namespace in self.namespaces.values() for row in namespace.steps.values())


@dataclass(frozen=True, slots=True)
class Change:
    """One transaction: all of it is durable, or none of it. Within a namespace, drops apply before puts."""

    put_namespaces: tuple[NamespaceRow, ...] = ()
    drop_namespaces: tuple[str, ...] = ()
    """Names of namespaces to drop, with all their rows and steps."""
    put_rows: tuple[tuple[str, ExpertKey, Row], ...] = ()
    drop_rows: tuple[tuple[str, ExpertKey, int], ...] = ()
    """(namespace, key, first_step) of each row to drop."""
    put_steps: tuple[tuple[str, StepRow], ...] = ()
    drop_steps: tuple[tuple[str, int], ...] = ()
    put_volumes: tuple[VolumeRow, ...] = ()

    @property
    def row_count(self) -> int:
        """Number of rows that it changes, for `Catalog.reserve`."""
        changed = (self.put_namespaces, self.put_rows, self.drop_rows, self.put_steps, self.drop_steps, self.put_volumes)
        return sum(map(len, changed))


class Catalog(Protocol):
    """The interface of a catalog: LMDB in the daemon, a plain dict in tests. Both pass the same contract tests."""

    def load(self) -> Contents:
        """Reads everything that is durable now. Raises CatalogError naming the row whose checksum or shape is wrong."""
        ...

    def reserve(self, row_count: int, *, kept_rows: int = 0) -> None:
        """Makes room before data is written: on return a Change of up to `row_count` rows will find room, and so will every later
        one while no more than `kept_rows` rows are kept. Raises CatalogError naming the bytes that are missing.
        """
        ...

    def apply(self, change: Change) -> None:
        """Makes `change` durable. Raises CatalogError; then the outcome is unknown until `load` after a reopen."""
        ...

    def reopen(self) -> None:
        """Closes and opens the store again, after an `apply` that raised."""
        ...

    def close(self) -> None: ...
