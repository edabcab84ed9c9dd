"""Reads of whole records: the transfer that brings one, and the check of what came. Owner of the traffic counters."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from paramstore.core.checksums import pack_sums
from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent, Located
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.device_sums import DeviceSums
from paramstore.engine.transfers.hashing import Hashing
from paramstore.engine.transfers.routes import ImageRead, Piece, PieceRead, check_pieces, cut_pieces, read_piece
from paramstore.engine.transfers.runner import volume_lane
from paramstore.engine.transfers.scheduler import Transfer
from paramstore.errors import ParamStoreError, TicketCancelled
from paramstore.storage.format.structures import Header, check_header
from paramstore.storage.volume.base import Volume

SUMS_PIECE_BYTES = 2 << 20
"""About how much is read at a time for device sums alone: the memory for it is beside the host budget, as a scrub's."""


@dataclass(slots=True)
class VolumeTraffic:
    """Bytes moved since start, per volume. bytes_written: records and notes, without zero-fill and without what failed."""

    bytes_read: int = 0
    bytes_written: int = 0
    note_bytes: int = 0
    reads: int = 0
    writes: int = 0
    failures: int = 0


class RecordReads:
    """Makes transfers that read, and verifies what they read."""

    def __init__(
        self, volumes: Mapping[int, Volume], *, store_uuid: bytes, piece_bytes: int, hashing: Hashing, sums: DeviceSums
    ) -> None:
        self.traffic = {index: VolumeTraffic() for index in volumes}
        self._volumes = volumes
        self._store_uuid = store_uuid
        self._piece_bytes = piece_bytes
        self._hashing = hashing
        self._sums = sums

    def whole(
        self, namespace: NamespaceState, key: ExpertKey, located: Located, target: memoryview, *, urgency: Urgency,
        settle: Callable[[Transfer], None], deadline_s: float | None = None,
    ) -> Transfer:  # fmt: skip
        """Makes the transfer that fills `target` (record_bytes, page-aligned) with the record that is located there."""
        part, extent = namespace.schema.stored, located.extent
        read = ImageRead(
            self._volumes[extent.volume], extent, target, part.header_bytes, self._hashing,
            makes_sums=self._sums.lacks(namespace, key, located),
        )  # fmt: skip
        pieces = cut_pieces(part, self._piece_bytes, len(part.fields))
        return read_transfer(extent, read.run, pieces, part.image_bytes, urgency=urgency, settle=settle, deadline_s=deadline_s)

    def pieces_for_sums(self, namespace: NamespaceState, located: Located) -> Iterator[Transfer]:
        """Makes the transfers that read a record for its device sums, to be run one after the other: they share a buffer."""
        part, extent = namespace.schema.stored, located.extent
        pieces = cut_pieces(part, SUMS_PIECE_BYTES, len(part.fields))
        buffer = memoryview(mmap.mmap(-1, max(piece.end - piece.start for piece in pieces)))
        run = partial(
            read_piece, self._volumes[extent.volume], extent.offset_bytes, buffer, part.header_bytes, self._hashing, makes_sums=True
        )
        for piece in pieces:
            yield read_transfer(extent, run, [piece], 0, urgency=Urgency.DEMAND, settle=lambda _: None)

    def verify(
        self, namespace: NamespaceState, key: ExpertKey, located: Located, transfer: Transfer, *, read_bytes: int
    ) -> tuple[Header | None, ParamStoreError | None]:
        """Checks a record that was read; returns its header, or the error that the read ended with. Counts the read either way.

        read_bytes: how much of the record was read.
        """
        header, error = None, transfer.error
        if error is None:
            try:
                header = self.check(namespace, key, located, transfer.results)
            except ParamStoreError as caught:
                error = caught
        traffic = self.traffic[located.extent.volume]
        if error is not None and not isinstance(error, TicketCancelled):
            traffic.failures += 1
        if transfer.error is None:
            traffic.bytes_read += read_bytes
            traffic.reads += 1
            namespace.stats.bytes_read += read_bytes
        return header, error

    def check(self, namespace: NamespaceState, key: ExpertKey, located: Located, results: list[PieceRead]) -> Header:
        """Returns the header of a record that was read, and notes its device sums where they were made. Raises CorruptRecord."""
        part, extent = namespace.schema.stored, located.extent
        place = f"volume {extent.volume}, offset {extent.offset_bytes}"
        head = next(result.header for result in results if result.header is not None)
        header = check_header(
            head, part=part, root=located.root, store_uuid=self._store_uuid, namespace=namespace.name,
            key=key, identity=located.identity, place=place,
        )  # fmt: skip
        check_pieces(header, part, results, place=place)
        if all(result.sums is not None for result in results):
            by_chunk = sorted(results, key=lambda result: result.first_chunk)
            self._sums.note(namespace.name, key, located, pack_sums([one for result in by_chunk for one in result.sums or ()]))
        return header


def read_transfer(
    extent: Extent, run: Callable[[Any], PieceRead], pieces: Iterable[Piece], record_bytes: int, *, urgency: Urgency,
    settle: Callable[[Transfer], None], deadline_s: float | None = None,
) -> Transfer:  # fmt: skip
    """Makes the transfer that reads `pieces` of a record in `extent`."""
    queued = deque(pieces)
    return Transfer(
        lane=volume_lane(extent.volume), urgency=urgency, run=run, pieces=queued, settle=settle, deadline_s=deadline_s,
        light_bytes=record_bytes if len(queued) == 1 else 0, is_read=True,
    )  # fmt: skip
