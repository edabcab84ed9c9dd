"""Measures visits of experts whose leases stand: 64 keys and 4 keys, beside acquire and release of the same keys.

Run it on an idle machine: `python bench/bench_standing.py [--quick] [--dir DIR] [--out FILE]`. It takes half a minute. Writes
bench/results/standing-<date>.json.
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
from paramstore_bench.standing import measure_standing

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Runs the bench. Gives 0 when every target holds, 1 otherwise: the figures are written either way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer calls: to see that all is well, not to quote")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk in question")
    parser.add_argument("--out", type=Path, help="the JSON file; default: bench/results/standing-<date>.json")
    arguments = parser.parse_args()

    progress, date = Console(stderr=True), machine.now()
    with (
        progress.status("bench standing") as status,
        tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.dir) as folder,
    ):
        bench = Bench(Plan.quick() if arguments.quick else Plan(), Path(folder), tell=status.update)
        started_s = bench.clock.now_s()
        rows = measure_standing(bench)
        report = Report(
            machine=machine.describe(arguments.dir), commit=machine.commit(),
            command="python bench/bench_standing.py" + " --quick" * arguments.quick, date=date,
            seconds=bench.clock.now_s() - started_s, rows=rows,
        )  # fmt: skip
    file = arguments.out or RESULTS / f"standing-{report.date[:10]}.json"
    file.write_bytes(encode(report))
    table.render(report, Console())
    progress.print(f"written: {file}")
    return 1 if report.short_rows else 0


if __name__ == "__main__":
    sys.exit(main())
