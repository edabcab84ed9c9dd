"""How reads of a volume's extents really go, proven by reads: no setting and no flag is believed.

- `gds`: with kvikio's own compatibility mode forbidden the bytes are right on the device, and the driver nvidia-fs has counted
  reads meanwhile. (Those of other processes count there too, so this is shown and not proven beyond them.)
- `cufile compat`: the same, but the driver has counted none, or cannot be asked.
- `kvikio compat`: kvikio brings right bytes, itself through the host's memory.
- `host`: it is not there, or its bytes are not right: they come through this process's own buffer.

Of these only the last two were seen: the others were never run on a GPU.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path

import torch

from paramstore.core.key import ExpertKey
from paramstore.errors import VolumeError
from paramstore_client.extents.extent_reader import ExtentReader
from paramstore_client.extents.volume_reads import KvikioReads, VolumeReads
from paramstore_client.handle.extent_lease import ExtentLease

_log = logging.getLogger(__name__)

DRIVER_STATS = Path("/proc/driver/nvidia-fs/stats")
READS_DONE = re.compile(r"^Reads\s*:\s*n=\d+\s+ok=(\d+)", re.MULTILINE)
"""The line of nvidia-fs with its reads, as NVIDIA's GPUDirect Storage troubleshooting guide shows it."""
UNREAD = 0x5A
"""What an image is filled with before each read, so that nothing of an earlier one passes for it."""


class Mode(StrEnum):
    """The word for how a volume's extents are read."""

    GDS = "gds"
    CUFILE_COMPAT = "cufile compat"
    KVIKIO_COMPAT = "kvikio compat"
    HOST = "host"


def driver_read_count(stats: Path = DRIVER_STATS) -> int | None:
    """How many reads the driver nvidia-fs has done since it was loaded; None where that cannot be told."""
    try:
        found = READS_DONE.search(stats.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def prove_mode(
    lease: ExtentLease, key: ExpertKey, device: torch.device, *, make_reads: Callable[[bool], VolumeReads] | None = None,
    count_reads: Callable[[], int | None] = driver_read_count,
) -> tuple[Mode, str]:  # fmt: skip
    """Reads the key's record to `device` up to two times; returns how its volume is read, and why not in a better way.

    make_reads: makes reads by kvikio that must be GDS's, or not. Raises CorruptRecord and VolumeError where the host's memory
    brings no right bytes either.
    """
    make_reads = make_reads or (lambda must_be_gds: KvikioReads(must_be_gds=must_be_gds))
    if reason := _refusal(lease, key, device, partial(make_reads, False)):
        return Mode.HOST, reason
    if device.type != "cuda":
        return Mode.KVIKIO_COMPAT, f"the bytes go to {device.type}"
    before = count_reads()
    if reason := _refusal(lease, key, device, partial(make_reads, True)):
        return Mode.KVIKIO_COMPAT, reason
    after = count_reads()
    if before is None or after is None or after <= before:
        return Mode.CUFILE_COMPAT, f"nvidia-fs counted {after} reads after the read, {before} before"
    return Mode.GDS, ""


def _refusal(lease: ExtentLease, key: ExpertKey, device: torch.device, make: Callable[[], VolumeReads]) -> str:
    """Why the reads that `make` makes do not bring the record's bytes; empty if they do."""
    try:
        direct = make()
    except VolumeError as error:
        return str(error) or repr(error)
    reader = ExtentReader(lease.part, device, direct=direct, warn=_log.debug)  # nobody else reads otherwise for it
    reader.read(lease, key, torch.full((lease.part.image_bytes,), UNREAD, dtype=torch.uint8, device=device))
    return reader.refusal
