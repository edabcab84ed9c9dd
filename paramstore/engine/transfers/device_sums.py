"""The device sums of records (`core.checksums`): who reads an extent past the daemon proves its bytes by them.

- They were made of bytes that had passed every check of the daemon's, or come from a file that says so under a checksum.
- Sums of another identity, or of another root, are no sums of the record: it is as if there were none.
"""

from __future__ import annotations

from collections.abc import Iterable

from paramstore.core.key import ExpertKey
from paramstore.core.location import Located
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.storage.format.device_sums import RecordSums


class DeviceSums:
    """Owner of the device sums of each key's record that was verified last. is_kept: False where nobody may lease extents: nothing
    is made or noted then."""

    def __init__(self, *, is_kept: bool) -> None:
        self.is_kept = is_kept
        self._records: dict[tuple[str, ExpertKey], RecordSums] = {}
        self.change_count = 0
        """Grows with every record whose sums are noted."""

    def lacks(self, namespace: NamespaceState, key: ExpertKey, located: Located) -> bool:
        """Whether the record's sums are to be made when it is read next."""
        return self.is_kept and not namespace.schema.is_trainable and self.find(namespace.name, key, located) is None

    def find(self, namespace: str, key: ExpertKey, located: Located) -> bytes | None:
        """The record's sums as `core.checksums.pack_sums` packs them, one a chunk of the stored part; None where there are none."""
        found = self._records.get((namespace, key))
        return found.sums if found is not None and (found.identity, found.root) == (located.identity, located.root) else None

    def note(self, namespace: str, key: ExpertKey, located: Located, sums: bytes) -> None:
        """Notes the sums of a record that was verified."""
        self._records[namespace, key] = RecordSums(namespace, key, located.identity, located.root, sums)
        self.change_count += 1

    def take_over(self, records: Iterable[RecordSums]) -> None:
        """Takes what an earlier daemon had noted, where nothing newer is known."""
        for record in records:
            self._records.setdefault((record.namespace, record.key), record)

    def records(self) -> list[RecordSums]:
        """What was noted, of every key of which a record was verified."""
        return list(self._records.values())
