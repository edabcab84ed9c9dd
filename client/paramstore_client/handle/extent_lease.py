"""A lease of extents: the right to read whole records from the volumes' files, past the daemon's memory, until it is released.

What is read is proven by nobody but who reads it: `extents/extent_reader.py` does, by root and device sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple
from weakref import WeakSet

from paramstore.core.checksums import SUM_BYTES
from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent, Identity
from paramstore.core.schema import Part
from paramstore.errors import LeaseError, ProtocolError, UnknownKey
from paramstore.wire.messages import GrantedExtents, Release
from paramstore_client.connection.shared_socket import Connection
from paramstore_client.connection.volume_file import VolumeFile
from paramstore_client.handle.lease import Releasable


class LeasedExtent(NamedTuple):
    """One record: where its image begins, its identity, and what proves its bytes."""

    file: VolumeFile
    extent: Extent
    identity: Identity
    root: int
    sums: bytes


class ExtentLease:
    """Extents leased for a list of keys. A context manager; one that is dropped is released."""

    def __init__(
        self, connection: Connection, answer: object, *, namespace: str, part: Part, keys: Sequence[ExpertKey],
        all_held: WeakSet[Releasable],
    ) -> None:  # fmt: skip
        """answer: what the daemon said to an `acquire_extents` of `keys`. all_held: the handle's leases; gets this one too, and
        lives as long as it does. Raises ProtocolError."""
        self._is_given_back = True
        if not isinstance(answer, GrantedExtents) or not len(keys) == len(answer.extents) == len(answer.sums):
            raise ProtocolError(f"no extents of {len(keys)} keys came for a lease of as many")
        self.namespace = namespace
        self.part = part
        self._connection = connection
        self._id = answer.id
        self._found: dict[ExpertKey, LeasedExtent] = {}
        for key, (volume, offset_bytes, length_bytes, epoch, version, root), sums in zip(
            keys, answer.extents, answer.sums, strict=True
        ):
            if length_bytes < part.image_bytes or offset_bytes < 0 or len(sums) != SUM_BYTES * len(part.chunks()):
                raise ProtocolError(f"an extent of {length_bytes} bytes with {len(sums)} bytes of sums came for {key}")
            extent = Extent(volume, offset_bytes, length_bytes)
            file = connection.segments.volume(volume)
            self._found[key] = LeasedExtent(file, extent, Identity(epoch, version), root, sums)
        self._all_held = all_held
        all_held.add(self)
        self._is_released = self._is_given_back = False

    def __getitem__(self, key: ExpertKey) -> LeasedExtent:
        """The key's extent. Raises LeaseError after release, UnknownKey for another key."""
        if self._is_released:
            raise LeaseError(f"this lease of extents of {self.namespace!r} was released: acquire them again")
        if key not in self._found:
            raise UnknownKey(f"key {key!r:.80} is not in this lease of {len(self._found)} extents of {self.namespace!r}")
        return self._found[key]

    def keys(self) -> list[ExpertKey]:
        """The keys, in the order asked."""
        return list(self._found)

    def release(self) -> None:
        """Gives the extents back: other records' bytes may lie there from here on. Idempotent, after an interrupt too."""
        if not self._is_given_back:
            self._is_released = True
            self._connection.post(Release([self._id]))
            self._is_given_back = True

    def __enter__(self) -> ExtentLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if not getattr(self, "_is_given_back", True) and not self._connection.is_failed:
            self.release()
