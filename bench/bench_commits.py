"""Measures what durability costs: commits of 1, 64 and 1,000 records beside the bare work, bytes written for each byte committed,
room on volumes, checksums, and reopening a store of 100,000 records.

Run it on an idle machine: `python bench/bench_commits.py [--dir DIR] [--out FILE]`. Writes bench/results/commits-<date>.json.
"""

from __future__ import annotations

import sys

from paramstore.bench.context import Bench
from paramstore.bench.report.rows import Row
from paramstore_bench.amplification import measure_amplification
from paramstore_bench.checksums import measure_checksums
from paramstore_bench.commits import measure_commits, measure_reopen
from paramstore_bench.frame import Script
from paramstore_bench.room import measure_room

SCRIPT = Script("commits", __doc__)


def main() -> int:
    """Runs the bench."""
    return SCRIPT.run(SCRIPT.parser().parse_args(), measure)


def measure(bench: Bench) -> list[Row]:
    """Measures everything."""
    rows = [measure_reopen(bench), *measure_commits(bench), *measure_amplification(bench), *measure_room(bench)]
    return [*rows, *measure_checksums(bench)]


if __name__ == "__main__":
    sys.exit(main())
