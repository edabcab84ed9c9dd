"""`paramstore bench tiers`: measures every figure the service is held to, in one run, on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from paramstore.bench.baseline import measure_baseline
from paramstore.bench.context import Bench, PeerMaker
from paramstore.bench.hbm import measure_hbm
from paramstore.bench.leases import measure_leases
from paramstore.bench.plan import Plan
from paramstore.bench.report import machine
from paramstore.bench.report.rows import Report, Row
from paramstore.bench.transfers import measure_optim, measure_param, measure_volumes
from paramstore.bench.update_alone import measure_update_alone
from paramstore.bench.updates import measure_apply
from paramstore.clock import MonotonicClock
from paramstore.errors import ConfigError


def run(
    plan: Plan, directory: Path, *, command: str, peers: tuple[PeerMaker, ...] = (), tell: Callable[[str], None]
) -> Report:
    """Measures all rows in a temporary folder of `directory`, which is removed whatever happens.

    Raises ConfigError if `directory` is no directory, CapacityError if it has not the room, before anything is written; and
    whatever the service raises.
    """
    clock = MonotonicClock()
    machine.check_directory(directory)
    machine.check_free_space(directory, plan.disk_bytes, quick_bytes=Plan.quick().disk_bytes)
    started_s, date = clock.now_s(), machine.now()
    try:
        temporary = tempfile.TemporaryDirectory(prefix="bench-", dir=directory)
    except OSError as error:
        raise ConfigError(f"--dir {directory}: cannot be written: {error.strerror}") from error
    with temporary as folder:
        bench = Bench(plan, Path(folder), peers=peers, tell=tell, clock=clock)
        rows = measure_all(bench)
    return Report(
        machine=machine.describe(directory),
        commit=machine.commit(),
        command=command,
        date=date,
        seconds=clock.now_s() - started_s,
        rows=rows,
    )


def measure_all(bench: Bench) -> list[Row]:
    """Measures all rows, in the order in which they are shown."""
    rows: list[Row] = []
    for size in bench.plan.record_sizes:
        rows += measure_param(bench, size)
        rows += measure_optim(bench, size)
        rows += measure_baseline(bench, size)
    rows += measure_volumes(bench, bench.plan.record_sizes[0])
    rows += measure_hbm(bench, bench.plan.record_sizes[0])
    rows += measure_leases(bench)
    for dtype in (torch.float32, torch.bfloat16):
        rows += [measure_apply(bench, dtype), measure_update_alone(bench, dtype)]
    return rows
