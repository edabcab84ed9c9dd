"""The gradient budget of the node: how many bytes of upload areas its sessions may have together."""

from __future__ import annotations

from collections.abc import Sequence

from paramstore.config import SEGMENT_ALIGNMENT_BYTES
from paramstore.engine.capacity.host import HostTier
from paramstore.engine.tables.arena import SegmentMemory
from paramstore.engine.tables.namespace import View
from paramstore.errors import CapacityError, ProtocolError
from paramstore.sizes import format_size

ROOM_RECORDS = 16
"""Without the setting each view adds room for so many whole records, and ROOM_BYTES."""
ROOM_BYTES = 4 << 20


class UploadBudget:
    """Gives sessions their upload segments. Owner of the count of their bytes."""

    def __init__(self, host: HostTier, *, budget_bytes: int | None) -> None:
        """host: makes the segments, and numbers them. budget_bytes: the setting; None allows what the open views may need."""
        self._host = host
        self._budget_bytes = budget_bytes
        self._taken: dict[object, int] = {}

    def open(self, client: object, length_bytes: int, views: Sequence[View]) -> tuple[int, SegmentMemory]:
        """Makes a writable segment of at least `length_bytes` for the session `client`, which has these views. Raises CapacityError
        naming the size needed; nothing is taken then."""
        if length_bytes <= 0:
            raise ProtocolError(f"an upload segment of {length_bytes} bytes")
        rounded, limit_bytes = -(-length_bytes // SEGMENT_ALIGNMENT_BYTES) * SEGMENT_ALIGNMENT_BYTES, self._limit(client, views)
        needed = self.used_bytes + rounded
        if needed > limit_bytes:
            raise CapacityError(
                f"upload areas would need {format_size(needed)}, gradient_budget allows {format_size(limit_bytes)} on this "
                f"node: raise it to {needed} bytes, or apply before pushing more"
            )
        memory = self._host.memory.upload(rounded)
        self._taken[client] = self.bytes_of(client) + rounded
        return self._host.next_segment_id(), memory

    def drop(self, client: object) -> None:
        """Gives back the bytes of a session's upload segments; they are closed."""
        self._taken.pop(client, None)

    def share(self, view: View) -> int | None:
        """The part of the budget that a rank may count on; None without the setting, and for a reader."""
        return None if self._budget_bytes is None or view.group is None else self._budget_bytes // view.group.world_size

    def bytes_of(self, client: object) -> int:
        return self._taken.get(client, 0)

    @property
    def used_bytes(self) -> int:
        return sum(self._taken.values())

    def _limit(self, client: object, views: Sequence[View]) -> int:
        """The limit on the bytes of all upload areas: the setting; without it, every expert's gradient once per writer, and room
        for a few whole records per view."""
        if self._budget_bytes is not None:
            return self._budget_bytes
        limit = self.used_bytes - self.bytes_of(client)
        for view in views:
            schema = view.namespace.schema
            limit += ROOM_RECORDS * max(schema.record_bytes, schema.initial_bytes) + ROOM_BYTES
            if view.is_writer and schema.is_trainable:
                limit += len(view.namespace.keys) * schema.gradient_bytes
        return limit
