"""Measures records from a daemon's volumes to the device by kvikio, beside the drive's raw rate; says by a probe how they come.

It never ran on a GPU.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

import paramstore as ps
from paramstore.bench.context import row_of_pairs
from paramstore.bench.pairs import Sample, sample_pairs
from paramstore.bench.report.rows import SUBJECT, Row
from paramstore.bench.service.daemon import serving
from paramstore.core.key import ExpertKey
from paramstore.errors import VolumeError
from paramstore_bench.device.place import Place
from paramstore_bench.device.plan import MIB, Plan, absent
from paramstore_client.extents.extent_reader import ExtentReader
from paramstore_client.extents.modes import prove_mode
from paramstore_client.extents.volume_reads import KvikioReads
from paramstore_client.handle.extent_lease import ExtentLease
from paramstore_client.namespace import acquire_extents

NAME = "read into the device by kvikio"
RECORDS_MAX = 32


def measure_kvikio(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Reads records from leased extents, one after the other, each proven where it lands."""
    try:
        reads = KvikioReads()
    except VolumeError as error:
        yield absent(NAME, str(error))
        return
    count = min(RECORDS_MAX, max(2, plan.copy_bytes // plan.piece_bytes))
    settings = {"extent_leases": count}
    with serving(directory / "extents", host_budget_bytes=4 * count * plan.piece_bytes + 64 * MIB, settings=settings) as service:
        schema = ps.param_schema({"w": ((plan.piece_bytes,), torch.uint8)})
        made = service.store.create_namespace("extents", schema, layers=1, experts=count)
        made.initialize(lambda key: {"w": torch.randint(0, 256, (plan.piece_bytes,), dtype=torch.uint8)})
        made.commit(1).wait()
        reader = service.store.open_namespace("extents")
        by = ExtentReader(schema.stored, place.device, direct=reads)
        with acquire_extents(reader, reader.keys()) as lease:
            mode, reason = prove_mode(lease, lease.keys()[0], place.device)
            pairs = sample_pairs(plan.rounds, _by_kvikio(place, by, lease, lease.keys()), _raw(lease, lease.keys()))
            row = row_of_pairs(
                pairs, name=NAME, case=f"{count} records in turn, each proven there", subject=SUBJECT,
                record_bytes=schema.record_bytes, against="the drive, to host memory, one reader",
            )  # fmt: skip
            note = f"by a probe: {mode}{reason and f' ({reason})'}; kvikio to the end: {by.is_direct}"
            yield msgspec.structs.replace(row, note=note)


def _by_kvikio(place: Place, by: ExtentReader, lease: ExtentLease, keys: Sequence[ExpertKey]) -> Callable[[int], Sample]:
    image = torch.empty(lease.part.image_bytes, dtype=torch.uint8, device=place.device)

    def sample(_: int) -> Sample:
        started_s = time.perf_counter()
        for key in keys:
            by.read(lease, key, image)
        place.finish()
        return Sample(len(keys) * image.nbytes, time.perf_counter() - started_s)

    return sample


def _raw(lease: ExtentLease, keys: Sequence[ExpertKey]) -> Callable[[int], Sample]:
    """Reads the same bytes as plainly as can be: with direct I/O where there is any."""
    memory = mmap.mmap(-1, lease.part.image_bytes)

    def sample(_: int) -> Sample:
        files = {lease[key].file: lease[key].file.opened_direct() or lease[key].file for key in keys}
        started_s = time.perf_counter()
        for key in keys:
            found = lease[key]
            assert os.preadv(files[found.file].fd, [memory], found.extent.offset_bytes) == len(memory)
        return Sample(len(keys) * len(memory), time.perf_counter() - started_s)

    return sample
