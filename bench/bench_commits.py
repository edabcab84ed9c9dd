"""Measures what durability costs: commits of 1, 64 and 1,000 records beside the bare work, bytes written for each byte committed,
checksums, and reopening a store of 100,000 records.

Run it on an idle machine: `python bench/bench_commits.py [--dir DIR] [--out FILE]`. Writes bench/results/commits-<date>.json.
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
from paramstore_bench.amplification import measure_amplification
from paramstore_bench.checksums import measure_checksums
from paramstore_bench.commits import measure_commits, measure_reopen

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Runs the bench. Gives 0 when every target holds, 1 otherwise: the figures are written either way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk in question")
    parser.add_argument("--out", type=Path, help="the JSON file; default: bench/results/commits-<date>.json")
    arguments = parser.parse_args()

    progress = Console(stderr=True)
    date = machine.now()
    with progress.status("bench commits") as status, tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.dir) as folder:
        bench = Bench(Plan(), Path(folder), tell=status.update)
        started_s = bench.clock.now_s()
        rows = [measure_reopen(bench), *measure_commits(bench), *measure_amplification(bench), measure_checksums(bench)]
        report = Report(
            machine=machine.describe(arguments.dir), commit=machine.commit(), command="python bench/bench_commits.py", date=date,
            seconds=bench.clock.now_s() - started_s, rows=rows,
        )  # fmt: skip
    file = arguments.out or RESULTS / f"commits-{report.date[:10]}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(encode(report))
    table.render(report, Console())
    progress.print(f"written: {file}")
    return 1 if report.short_rows else 0


if __name__ == "__main__":
    sys.exit(main())
