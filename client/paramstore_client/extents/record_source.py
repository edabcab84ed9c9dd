"""Records for slots, straight from the volumes: leased a few at a time, read and proven, and given back."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from paramstore.core.arguments import wrong
from paramstore.core.key import ExpertKey
from paramstore.errors import CapacityError, SchemaMismatch
from paramstore.wire.messages import EXTENT_KEYS_MAX
from paramstore_client.extents.extent_reader import ExtentReader, reads_of_kvikio
from paramstore_client.handle.extent_lease import ExtentLease
from paramstore_client.namespace import Namespace, acquire_extents

_log = logging.getLogger(__name__)


class RecordSource:
    """Leases extents of a reader's namespace for a device, and has the reader that proves what comes from them."""

    keys_at_once = EXTENT_KEYS_MAX
    """Most keys of one lease."""

    def __init__(self, namespace: Namespace, device: torch.device) -> None:
        """Raises SchemaMismatch where `param` does not lie on the volumes, VersionMismatch, LeaseError, CapacityError and what the
        first of its leases raises: where no extent can be leased this says so, and not the first visit."""
        if not isinstance(namespace, Namespace):
            raise wrong("namespace", namespace, "an open namespace, for reads='volumes'")
        if namespace.schema.is_trainable:
            raise SchemaMismatch(f"reads='volumes': {namespace.name!r} is trained: its `param` lies on no volume")
        acquire_extents(namespace, namespace.keys()[:1]).release()
        self._namespace = namespace
        self._is_short = False
        self.reader = ExtentReader(namespace.schema.stored, device, direct=reads_of_kvikio())

    def lease(self, keys: Sequence[ExpertKey], timeout_s: float | None = None) -> ExtentLease | None:
        """Leases the extents of at most `keys_at_once` keys; None where so many are not to be had, as others have them or the
        daemon leases fewer. Raises what `acquire_extents` raises else."""
        try:
            return acquire_extents(self._namespace, keys, timeout_s=timeout_s)
        except CapacityError as error:
            if len(keys) == 1 and not self._is_short:
                _log.warning("a record comes through the daemon's memory, as others may from here on: %s", error)
                self._is_short = True
            return None

    def describe(self) -> str:
        """How records come, for people."""
        way = "by kvikio" if self.reader.is_direct else f"through a buffer of the host's: {self.reader.refusal or 'no kvikio'}"
        return f"records are read from the volumes {way}"
