"""Makes the rows of a layer in parts on devices, and starts a rank on each.

One GPU shows what a strategy takes of time and memory beside one that keeps all, with a rank alone: its exchanges stay on the
device. What parts gain beside exchanges needs two or more. The processor stands for a device where there is none, which says
nothing of GPUs: it shows that the bench runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from paramstore.bench.pairs import Pairs
from paramstore.bench.report.rows import SUBJECT, Row
from paramstore_bench.moe.sizes import Sizes
from paramstore_bench.moe.task import run_by_torchrun
from paramstore_client.moe.pipeline_plan import REUSES, SPLITS

TASKS, FOUND = "device_tasks.json", "device_found.json"
PIPELINES = [(parts, split, "keep") for split in SPLITS for parts in (2, 4)] + [(4, "experts", each) for each in REUSES[1:]]
DEVICES = ("cpu", "cuda")
MOST_RANKS = 4


class DeviceTask(msgspec.Struct, frozen=True):
    """A layer on devices, and the pipelines that it has: number of parts, split, reuse."""

    sizes: Sizes
    device: str
    pipelines: list[tuple[int, str, str]]


class DeviceFound(msgspec.Struct, frozen=True):
    """A pipeline beside one part that keeps all. Bytes of the rank with the most. held: between the passes. peak: at most."""

    pairs: Pairs
    held_bytes: int
    peak_bytes: int
    plain_held_bytes: int
    plain_peak_bytes: int


def missing_devices(device: str) -> str:
    """Why nothing can be measured on several devices; "" where it can."""
    count = torch.cuda.device_count() if device == "cuda" else 2
    return "" if count >= 2 else f"unmeasured: it needs 2 GPUs or more, here are {count}"


def device_rows(sizes: Sizes, device: str, folder: Path, *, ranks: int) -> Iterator[Row]:
    """Makes the rows of a layer on `ranks` devices; in an empty folder. Raises StoreUnavailable where a rank ends early."""
    (folder / TASKS).write_bytes(msgspec.json.encode(DeviceTask(sizes, device, PIPELINES)))
    run_by_torchrun("paramstore_bench.moe.device.rank", folder, ranks=ranks)
    for (parts, split, reuse), found in zip(
        PIPELINES, msgspec.json.decode((folder / FOUND).read_bytes(), type=list[DeviceFound]), strict=True
    ):
        yield Row(
            name=f"layer in parts on {ranks} {device} device{'s' * (ranks > 1)}",
            case=f"{sizes}, {parts} parts of {split}, {reuse}", subject=SUBJECT, value=found.pairs.rate, unit="tokens/s",
            against="one part, all kept", limit=found.pairs.limit_rate, ratio=found.pairs.ratio, ratio_min=found.pairs.ratio_min,
            ratio_max=found.pairs.ratio_max,
            parts={
                name: float(getattr(found, name))
                for name in ("held_bytes", "plain_held_bytes", "peak_bytes", "plain_peak_bytes")
            },
        )  # fmt: skip
