"""Runs the battery: everything that is claimed of a CUDA device, on one, or on its twin on the CPU; prints a table, writes
bench/results/device-<date>.json, and beside it the log.

`python bench/bench_device.py [--quick] [--twin] [--only NAMES] [--dir DIR] [--out FILE] [--commit TEXT]`, on an idle machine; 8
minutes at most. Ends with 2, and measures nothing, where there is no CUDA device and no --twin; with 1 where a part was not
done: the JSON has the end of its output, and what the others found. Each row says what it ran on.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from paramstore.bench.report import machine, table
from paramstore.bench.report.rows import Report, Row
from paramstore.cli.signals import end_as_interrupt
from paramstore_bench.device.battery import DONE, BatteryReport, PartReport, keep, run_part
from paramstore_bench.device.copies import measure_overlap, measure_registration, measure_tier_copies
from paramstore_bench.device.extents import measure_kvikio
from paramstore_bench.device.kernels import measure_fp8, measure_groups, measure_sums
from paramstore_bench.device.logits import measure_logits
from paramstore_bench.device.memory_limits import measure_memory_limits
from paramstore_bench.device.place import Place
from paramstore_bench.device.plan import Plan
from paramstore_bench.device.ring_turns import measure_ring
from paramstore_bench.device.speed import measure_speed
from paramstore_bench.device.suite import measure_streams, measure_tests
from paramstore_bench.device.waits import measure_waits
from paramstore_bench.frame import Script

NO_DEVICE, NOT_DONE = 2, 1
LIMIT_S = 470.0
"""Time of all parts together."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the battery. measure: yields its rows one by one. limit_s: time that it gets in any case, and more where parts
    before it took less than theirs. uses_streams: whether on the twin it runs on simulated streams."""

    measure: Callable[[Place, Plan, Path], Iterator[Row]]
    limit_s: float
    uses_streams: bool = False


PARTS = {
    "registration": Part(measure_registration, 30, uses_streams=True),
    "waits": Part(measure_waits, 30, uses_streams=True),
    "logits": Part(measure_logits, 50),
    "memory": Part(measure_memory_limits, 30),
    "ring": Part(measure_ring, 20),
    "tests": Part(measure_tests, 45),
    "groups": Part(measure_groups, 40),
    "copies": Part(measure_overlap, 25),
    "tier copies": Part(measure_tier_copies, 25),
    "speed": Part(measure_speed, 85),
    "streams": Part(measure_streams, 45, uses_streams=True),
    "sums": Part(measure_sums, 15),
    "fp8": Part(measure_fp8, 15),
    "kvikio": Part(measure_kvikio, 15),
}
"""In the order of what is asked first, should time run out."""
SCRIPT = Script("device", __doc__, quick="small sets: a check, not figures to quote")


def main(words: Sequence[str] | None = None) -> int:
    """Runs the battery. Gives 0 when every part was done, NOT_DONE, or NO_DEVICE where there is nothing to run on."""
    parser = SCRIPT.parser()
    parser.add_argument("--twin", action="store_true", help="on the CPU, with the smallest sets: a check of the battery itself")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, separated by commas; default all: {', '.join(PARTS)}")
    parser.add_argument("--commit", help="the commit of this code, where git cannot tell it")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if unknown := set(arguments.only.split(",")) - PARTS.keys():
        parser.error(f"--only {','.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    if not arguments.twin and not torch.cuda.is_available():
        sys.stderr.write(
            f"bench_device: no CUDA device: torch {torch.__version__} finds none. Run it on a machine with an NVIDIA GPU and a "
            "CUDA build of torch (bench/carry_device.py packs what else it needs), or with --twin; `python bench/bench_tiers.py` "
            "measures the host's tiers.\n"
        )
        return NO_DEVICE
    if arguments.part:
        end_as_interrupt()
        measure_part(arguments)
        return 0
    return SCRIPT.carry_out(lambda: run(arguments))


def measure_part(arguments: argparse.Namespace) -> None:
    """Measures one part in this process; each row is kept as it comes. out: the file of its rows; limit: its time, in seconds."""
    faulthandler.enable()
    if arguments.twin:
        torch.set_num_threads(1)  # those of small tensors only wait for each other
    part, place = PARTS[arguments.part], Place(is_twin=arguments.twin)
    faulthandler.dump_traceback_later(0.8 * arguments.limit)  # to the log: where it stands when its time is nearly over
    for row in part.measure(place, plan_of(arguments), arguments.dir):
        keep(row, arguments.out, on=place.name(uses_streams=part.uses_streams))
        print(f"{row.name}, {row.case}: {row.value:.4g} {row.unit} {row.note}", flush=True)


def plan_of(arguments: argparse.Namespace) -> Plan:
    return Plan.twin() if arguments.twin else Plan.quick() if arguments.quick else Plan()


def run(arguments: argparse.Namespace) -> int:
    """Runs the parts that were asked for, and writes the report after each."""
    started_s, file = time.monotonic(), SCRIPT.file(arguments)
    log = file.with_suffix(".log")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # of the parts: such a machine often reaches nothing, and nobody needs to
    machine.check_directory(arguments.dir)
    log.write_bytes(b"")
    directory = arguments.dir.absolute()  # a part starts programs elsewhere
    flags = [flag for flag, is_given in (("--quick", arguments.quick), ("--twin", arguments.twin)) if is_given]
    about = SCRIPT.heading(arguments)
    about["machine"]["device"] = Place(is_twin=arguments.twin).describe()
    about["commit"] = arguments.commit or about["commit"]
    about["command"] += " --twin" * arguments.twin
    progress, done = Console(stderr=True), list[PartReport]()

    def report() -> BatteryReport:
        return BatteryReport(**about, seconds=time.monotonic() - started_s, parts=done)

    with tempfile.TemporaryDirectory(prefix="bench-", dir=directory, ignore_cleanup_errors=True) as folder:
        names = arguments.only.split(",")
        for number, name in enumerate(names):
            kept_s = sum(PARTS[later].limit_s for later in names[number + 1 :])
            limit_s = max(1.0, LIMIT_S - kept_s - (time.monotonic() - started_s))
            progress.print(f"{name}, {limit_s:.0f} s at most", highlight=False)
            own = Path(folder) / str(number)  # short: a daemon's socket lies below it
            own.mkdir()
            rows = own / "rows.jsonl"
            command = [sys.executable, __file__, *flags, "--part", name, "--dir", str(own), "--out", str(rows)]
            done.append(run_part(name, [*command, "--limit", str(limit_s)], limit_s=limit_s, rows=rows, log=log))
            stop_daemon(own / "store")
            report().write(file)
            shutil.rmtree(own, ignore_errors=True)
    show(report(), Console())
    progress.print(f"written: {file}, {log}", highlight=False)
    return 0 if all(part.outcome == DONE for part in done) else NOT_DONE


def stop_daemon(store: Path) -> None:
    """Ends the daemon that a killed part may have left."""
    if store.exists():
        subprocess.run([sys.executable, "-m", "paramstore", "stop", str(store)], capture_output=True, check=False)


def show(report: BatteryReport, console: Console) -> None:
    """Prints the rows as a table, and what was not done."""
    rows: list[Row] = [row for part in report.parts for row in part.rows]
    table.render(Report(machine=report.machine, commit=report.commit, command=report.command, date=report.date,
                        seconds=report.seconds, rows=rows), console)  # fmt: skip
    for row in rows:
        if row.note:
            console.print(f"{row.name}, {row.case}: {row.note}", highlight=False, markup=False)
    for part in report.parts:
        if part.outcome != DONE:
            console.print(f"part {part.name}: {part.outcome}\n{part.error}", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
