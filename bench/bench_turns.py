"""Measures how long one turn of the daemon's event loop takes at most, while 131,072 small records are committed and rolled back.

Run it on an idle machine: `python bench/bench_turns.py [--dir DIR] [--keys N] [--out FILE]`. It takes ten minutes and 5 GB. Writes
bench/results/turns-<date>.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from paramstore.bench.context import Bench
from paramstore.bench.plan import Plan
from paramstore.bench.report import machine, table
from paramstore.bench.report.rows import Report, encode
from paramstore.daemon.garbage import tables_spared
from paramstore_bench.turns import KEYS, measure_turns

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Runs the bench. Gives 0 when every target holds, 1 otherwise: the figures are written either way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk in question")
    parser.add_argument("--keys", type=int, default=KEYS, help="number of records")
    parser.add_argument("--out", type=Path, help="the JSON file; default: bench/results/turns-<date>.json")
    arguments = parser.parse_args()

    progress = Console(stderr=True)
    date = machine.now()
    with (
        progress.status("bench turns") as status,
        tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.dir) as folder,
        tables_spared(),
    ):
        bench = Bench(Plan(), Path(folder), tell=status.update)
        started_s = bench.clock.now_s()
        rows = measure_turns(bench, keys=arguments.keys)
        report = Report(
            machine=machine.describe(arguments.dir), commit=machine.commit(), command="python bench/bench_turns.py", date=date,
            seconds=bench.clock.now_s() - started_s, rows=rows,
        )  # fmt: skip
    file = arguments.out or RESULTS / f"turns-{report.date[:10]}.json"
    file.write_bytes(encode(report))
    table.render(report, Console())
    progress.print(f"written: {file}")
    return 1 if report.short_rows else 0


if __name__ == "__main__":
    sys.exit(main())
