"""The durable map: which namespaces exist, which record is in force at which step, which volumes belong.

Rows are (namespace, layer, expert, first step) -> Located; in force at step s is the newest row with first_step <= s.
The whole catalog is read into `Contents` at open and afterwards only written: one `Change` is one durable transaction.
All calls are made on one thread, never the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paramstore.core.key import ExpertKey
from paramstore.core.place import Located

DRAFT_STEP = -1
"""The step of a namespace's *draft*: values of an initialization that is not over. Durable, below every step that can be opened,
and itself opened by nobody; the first commit takes its place. Its rows begin at this step, and stay in force after that commit."""


class Row(NamedTuple):
    """`located` is in force from `first_step` until the key's next row."""

    first_step: int
    located: Located


STEP_ROWS_BOUND = 320
"""What a step's row can take, with the longest `extra` and log, in rows of records."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step that can be opened. note_slot: where its commit note lies on every volume. applies: how many applies it covers.
    is_snapshot: it stays until the snapshot is dropped. is_prepared: durable, above all others, and not committed yet.
    log: `storage.apply_log.pack_log` of what its records may have missed; empty where records miss nothing.
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
    """schema: a description of `core.schema.Schema`. epoch and sequence never decrease.

    epoch_bounds: for every earlier epoch, the last sequence that still counts (a rollback sets it).
    applies: how many applies the committed step covers (`last_apply` of a record's header counts in them).
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
    """written_bytes: below it every block has been written once (write-back is twice as fast there).

    bytes_written: all that was written to it over the store's life, zero-fill among it. place: its directory, for messages. Both
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
    """All the catalog holds of one namespace. rows: per key, oldest first. steps: by step."""

    namespace: NamespaceRow
    rows: dict[ExpertKey, list[Row]] = field(default_factory=dict)
    steps: dict[int, StepRow] = field(default_factory=dict)


@dataclass(slots=True)
class Contents:
    """The whole catalog, as read at open."""

    store_uuid: bytes
    namespaces: dict[str, NamespaceContents] = field(default_factory=dict)
    volumes: dict[int, VolumeRow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """One transaction: all of it is durable, or none of it. Within a namespace, drops apply before puts."""

    put_namespaces: tuple[NamespaceRow, ...] = ()
    drop_namespaces: tuple[str, ...] = ()
    """With all their rows and steps."""
    put_rows: tuple[tuple[str, ExpertKey, Row], ...] = ()
    drop_rows: tuple[tuple[str, ExpertKey, int], ...] = ()
    """(namespace, key, first_step)."""
    put_steps: tuple[tuple[str, StepRow], ...] = ()
    drop_steps: tuple[tuple[str, int], ...] = ()
    put_volumes: tuple[VolumeRow, ...] = ()

    @property
    def row_count(self) -> int:
        """For `Catalog.reserve`."""
        changed = (self.put_namespaces, self.put_rows, self.drop_rows, self.put_steps, self.drop_steps, self.put_volumes)
        return sum(map(len, changed))


class Catalog(Protocol):
    """LMDB in the daemon, a plain dict in tests; both pass the same contract tests."""

    def load(self) -> Contents:
        """Everything durable now. Raises CatalogError naming the row whose checksum or shape is wrong."""
        ...

    def reserve(self, row_count: int, *, kept_rows: int = 0) -> None:
        """Called before data is written: on return a Change of up to `row_count` rows will find room, and so will every later one
        while no more than `kept_rows` rows are kept. Raises CatalogError naming the bytes that are missing.
        """
        ...

    def apply(self, change: Change) -> None:
        """On return `change` is durable. Raises CatalogError; then the outcome is unknown until `load` after a reopen."""
        ...

    def reopen(self) -> None:
        """Closes and opens the store again, after an `apply` that raised."""
        ...

    def close(self) -> None: ...
