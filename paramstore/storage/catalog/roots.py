"""The roots of all records of a step, packed as a commit note combines them, so that the next step only has to patch its changes.

Combining 15,000 roots from the ledger's rows takes 2.3 ms, 1,000 of them more than a small commit's transaction; patching the
packed rows and hashing them takes 30 us (on a 2-core virtual machine, `timeit`).
"""

from __future__ import annotations

from collections.abc import Iterable

from paramstore.core.key import ExpertKey
from paramstore.storage.format.structures import ROOT_ROW, combine_packed_roots


class RootTable:
    """A table of packed rows (layer, expert, root), one per key, in order of the keys. Immutable: `patched` makes another."""

    __slots__ = ("_offsets", "_rows")

    def __init__(self, roots: Iterable[tuple[ExpertKey, int]]) -> None:
        rows = sorted(roots)
        self._offsets = {key: at * ROOT_ROW.size for at, (key, _) in enumerate(rows)}
        self._rows = b"".join(ROOT_ROW.pack(*key, root) for key, root in rows)

    def has(self, keys: Iterable[ExpertKey]) -> bool:
        """Whether there is a row for each of `keys`."""
        return self._offsets.keys() >= set(keys)

    def patched(self, roots: Iterable[tuple[ExpertKey, int]]) -> RootTable:
        """Returns a table in which these keys, all of which have a row, have these roots."""
        rows = bytearray(self._rows)
        for key, root in roots:
            ROOT_ROW.pack_into(rows, self._offsets[key], *key, root)
        table = RootTable.__new__(RootTable)
        table._offsets, table._rows = self._offsets, bytes(rows)
        return table

    def combined(self) -> int:
        """Returns `storage.format.structures.combine_roots` of all rows."""
        return combine_packed_roots(self._rows)
