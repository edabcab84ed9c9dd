"""Reads whole records from leased extents into images, and proves them where they land.

- Nothing is served unproven: the header by its root, then every chunk by its device sum, on the device that has the bytes.
- kvikio reads if it is there. Where it fails, or brings other bytes than the host's memory does, that is said once, and the host
  reads from then on.
- Bytes that are wrong both ways are damaged: CorruptRecord.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from paramstore.core import checksums
from paramstore.core.checksums import SUM_BYTES, header_root
from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.schema import Part
from paramstore.errors import CorruptRecord, VolumeError
from paramstore_client.extents.sums import device_sums, multipliers_on
from paramstore_client.extents.volume_reads import BounceReads, KvikioReads, VolumeReads, bytes_of
from paramstore_client.handle.extent_lease import ExtentLease, LeasedExtent

_log = logging.getLogger(__name__)


def reads_of_kvikio() -> VolumeReads | None:
    """Reads by kvikio; None, and a line in the log, where it cannot be had."""
    try:
        return KvikioReads()
    except VolumeError as error:
        _log.info("records are read through the host's memory: %s", error)
        return None


class ExtentReader:
    """Reads records of one part to images on one device. Used by one thread.

    direct: how they are read as long as that brings right bytes; None for the host's memory alone. bounce: through the host's.
    warn: is told, once, that `direct` is given up.
    """

    def __init__(
        self, part: Part, device: torch.device, *, direct: VolumeReads | None, bounce: VolumeReads | None = None,
        warn: Callable[[str, str], object] = _log.warning,
    ) -> None:  # fmt: skip
        self._part = part
        self._direct = direct
        self._warn = warn
        self._bounce = bounce or BounceReads(is_pinned=device.type == "cuda")
        self._odd = multipliers_on(device) if device.type != "cpu" else None
        self.refusal = ""
        """Why `direct` is used no more."""

    @property
    def is_direct(self) -> bool:
        """Whether records are read without the host's memory, as far as is known."""
        return self._direct is not None

    def read(self, lease: ExtentLease, key: ExpertKey, image: Tensor) -> Identity:
        """Fills `image`, uint8 [image_bytes] without gaps on the reader's device, with the key's record; returns its identity.

        Raises CorruptRecord where the volume's bytes are not the record's, VolumeError where they cannot be read, LeaseError and
        UnknownKey; then `image` holds garbage.
        """
        leased = lease[key]
        failure = None
        if self._direct is not None:
            try:
                self._direct.read(leased.file, leased.extent.offset_bytes, image)
                failure = self._objection(leased, image)
            except VolumeError as error:
                failure = str(error) or repr(error)
            if failure is None:
                return leased.identity
        self._bounce.read(leased.file, leased.extent.offset_bytes, image)
        if (objection := self._objection(leased, image)) is not None:
            (volume, offset_bytes, _), (epoch, version) = leased.extent, leased.identity
            raise CorruptRecord(
                f"record {key} of namespace {lease.namespace!r}, version {version} of epoch {epoch}, at volume {volume}, offset "
                f"{offset_bytes}: {objection}"
            )
        if failure is not None:
            self._give_up(failure)
        return leased.identity

    def _give_up(self, reason: str) -> None:
        self._direct, self.refusal = None, reason
        self._warn("records are read through the host's memory from here on, which has right bytes: %s", reason)

    def _objection(self, leased: LeasedExtent, image: Tensor) -> str | None:
        """Why the image is not the leased record, naming what differs first; None if it is."""
        if (found := header_root(bytes_of(image[: self._part.header_bytes].cpu()))) != leased.root:
            return f"header root {found:016x}, the catalog has {leased.root:016x}"
        sums = self._sums(image)
        if sums == leased.sums:
            return None
        starts = range(0, len(sums), SUM_BYTES)
        chunk = next(start for start in starts if sums[start : start + SUM_BYTES] != leased.sums[start : start + SUM_BYTES])
        return f"chunk {chunk // SUM_BYTES} has another device sum than when the daemon verified it"

    def _sums(self, image: Tensor) -> bytes:
        """The image's device sums, packed; on the CPU by numpy, which is many times faster there than torch's expression."""
        if self._odd is None:
            return checksums.pack_sums(checksums.device_sums(bytes_of(image), self._part.chunks()))
        sums: bytes = device_sums(image, self._part, self._odd).cpu().numpy().astype("<i8").tobytes()
        return sums
