"""What a program may know of how experts come to a device here."""

from __future__ import annotations

import torch

from paramstore.core.arguments import wrong
from paramstore.errors import CapacityError, LeaseError, SchemaMismatch, StepDropped, VersionMismatch
from paramstore.wire.messages import EXTENT_KEYS_MAX, ExtentModes, Stats
from paramstore_client.connection import answers
from paramstore_client.device.tier import device_of
from paramstore_client.extents.modes import prove_mode
from paramstore_client.namespace import Namespace, acquire_extents


def device_report(namespace: Namespace, device: torch.device | str = "cpu") -> dict[str, object]:
    """Says how extents of each volume that holds experts of `namespace` can be read to `device`: by reading a record of each, and
    proving its bytes there.

    Returns {device, volumes, reasons}: by the number of each volume among the places of the first 64 experts a word, `gds`,
    `cufile compat`, `kvikio compat` or `host`, and why it is no better one. Where no extents can be leased, or no more, as others
    have them, `volumes` ends there, and the reason stands under None. The first three words are those of a GPU, or of kvikio, and
    the first two were never run on a GPU. `paramstore status` says the words from then on, as long as the handle is open.
    Raises CorruptRecord and VolumeError for a record that cannot be read in any way.
    """
    if not isinstance(namespace, Namespace):
        raise wrong("namespace", namespace, "an open namespace")
    target = device_of(device)
    volumes: dict[int, str] = {}
    reasons: dict[int | None, str] = {}
    volume_count = _volume_count(namespace)
    for key in namespace.keys()[:EXTENT_KEYS_MAX]:
        if len(volumes) == volume_count:
            break  # each has its word
        try:
            lease = acquire_extents(namespace, [key])
        except (CapacityError, LeaseError, SchemaMismatch, StepDropped, VersionMismatch) as error:
            reasons[None] = str(error)
            break
        with lease:
            volume = lease[key].extent.volume
            if volume not in volumes:
                volumes[volume], reasons[volume] = prove_mode(lease, key, target)
    if volumes:
        namespace._connection.post(ExtentModes(namespace._handle, [(volume, str(word)) for volume, word in volumes.items()]))
    return {"device": str(target), "volumes": volumes, "reasons": reasons}


def _volume_count(namespace: Namespace) -> int:
    """How many volumes the store has."""
    return len(namespace._send(Stats(namespace._next_id()), "stats", answers.mapping).wait()["volumes"])
