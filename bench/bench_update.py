"""Measures the update phase with the states on the volume, beside the limits of this machine and DeepSpeed ZeRO-Infinity; and the
native AdamW kernel beside torch. Writes bench/results/update-<date>.json and a picture next to it.

Run it on an idle machine: `python bench/bench_update.py [--quick] [--dir DIR] [--out FILE] [--rules touched,exact]`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from bench_tiers import check_out
from deepspeed_peer import VARIABLE, missing_reason, start_all
from paramstore.bench.context import Bench
from paramstore.bench.plan import LARGE, SMALL, Plan, RecordSize
from paramstore.bench.report import machine, table
from paramstore.bench.report.rows import Report, Row, encode
from paramstore.bench.service.experts import adamw_schema, rule_is_known
from paramstore.cli.exits import exit_code
from paramstore.cli.signals import end_as_interrupt
from paramstore.errors import ParamStoreError
from paramstore_bench.native_update import QUICK_CASES, SERVED_DTYPES, measure_native, measure_served
from paramstore_bench.step_plot import draw_steps
from paramstore_bench.update_phase import cells_of, measure_phases

RESULTS = Path(__file__).parent / "results"
PARAMETERS = 151_000_000
"""Parameters that are updated: as many as in the training that the peers were measured with."""
STEPS, QUICK_STEPS = 9, 3
NATIVE_ROUNDS, QUICK_NATIVE_ROUNDS = 31, 5
QUICK_SHARE = 16
"""Divisor of the amounts in a quick check."""
QUICK_RESIDENT = (None, 0.5)


def main() -> int:
    """Runs the bench. Gives 0 when every target holds, 1 otherwise: the figures are written either way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller records: a check, not figures to quote")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk in question")
    parser.add_argument("--out", type=Path, help="the JSON file; default: bench/results/update-<date>.json")
    parser.add_argument("--rules", default="touched,exact", help="of touched, exact: what an apply does to idle records")
    arguments = parser.parse_args()
    file = arguments.out or RESULTS / f"update-{machine.now()[:10]}.json"
    try:
        check_out(file)
        return measure(file, arguments.dir, is_quick=arguments.quick, rules=arguments.rules.split(","))
    except ParamStoreError as error:
        sys.stderr.write(f"bench_update: {type(error).__name__}: {error}\n")
        return exit_code(error)
    except KeyboardInterrupt:
        return 130


def measure(file: Path, directory: Path, *, is_quick: bool, rules: list[str]) -> int:
    """Runs the bench, writes `file` and the picture, and prints the table. Rows left out are named in the file, with reasons."""
    command = "python bench/bench_update.py" + (" --quick" if is_quick else "")
    end_as_interrupt()
    progress, date = Console(stderr=True), machine.now()
    python = os.environ.get(VARIABLE)
    left_out = {"DeepSpeed": reason} if (reason := missing_reason(python)) else {}
    known = [rule for rule in rules if rule_is_known(rule)]
    left_out |= {f"rule {rule}": "this version does not know it" for rule in rules if not rule_is_known(rule)}
    rows: list[Row] = []
    with progress.status("bench update") as status, tempfile.TemporaryDirectory(prefix="bench-", dir=directory) as folder:
        bench = Bench(Plan(), Path(folder), tell=status.update)
        started_s = bench.clock.now_s()
        for size in (SMALL,) if is_quick else (LARGE, SMALL):
            rows += measure_size(bench, size, known, None if "DeepSpeed" in left_out else python, is_quick=is_quick)
        rows += measure_native(bench, QUICK_NATIVE_ROUNDS, QUICK_CASES) if is_quick else measure_native(bench, NATIVE_ROUNDS)
        for size in (SMALL,) if is_quick else (LARGE, SMALL):
            sized = replace(bench, plan=replace(bench.plan, expert_size=size))
            rows += [measure_served(sized, dtype, QUICK_NATIVE_ROUNDS if is_quick else NATIVE_ROUNDS) for dtype in SERVED_DTYPES]
        seconds = bench.clock.now_s() - started_s
    facts = {**machine.describe(directory), "left_out": left_out}
    report = Report(machine=facts, commit=machine.commit(), command=command, date=date, seconds=seconds, rows=rows)
    file.write_bytes(encode(report))
    draw_steps(report, file.with_suffix(".png"))
    table.render(report, Console())
    for name, reason in left_out.items():
        progress.print(f"left out: {name}: {reason}")
    progress.print(f"written: {file}, {file.with_suffix('.png')}")
    return 1 if report.short_rows else 0


def measure_size(bench: Bench, size: RecordSize, rules: list[str], python: str | None, *, is_quick: bool) -> list[Row]:
    """Measures the update phase with records of this size. Peers know no records: they stand beside one size only."""
    bench = replace(bench, plan=replace(bench.plan, expert_size=size))
    elements = adamw_schema(size, torch.bfloat16).parameter_elements
    count = max(8, round((PARAMETERS / QUICK_SHARE if is_quick else PARAMETERS) / elements))
    with ExitStack() as stack:
        peers = []
        if python is not None and (size is LARGE or is_quick):
            bench.tell("DeepSpeed starts (the first time it compiles its operators, for minutes)")
            peers = list(start_all(python, stack.enter_context(bench.folder("deepspeed")), blocks=count, elements=elements))
            for peer in peers:
                stack.callback(peer.close)
        cells = [cell for rule in rules for cell in cells_of(rule) if not is_quick or cell.resident in QUICK_RESIDENT]
        return measure_phases(
            bench, cells, param_dtype=torch.bfloat16, count=count, threads=len(os.sched_getaffinity(0)),
            steps=QUICK_STEPS if is_quick else STEPS, peers=peers,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
