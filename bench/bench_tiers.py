"""`paramstore bench tiers` with the peers beside it; writes bench/results/tiers-<date>.json and a picture next to it.

Run it on an idle machine: `python bench/bench_tiers.py [--quick] [--dir DIR] [--out FILE]`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from peers import PEERS
from rich.console import Console

from paramstore.bench import table
from paramstore.bench.plan import Plan
from paramstore.bench.plot import draw
from paramstore.bench.report import encode
from paramstore.bench.tiers import run

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """0 when every target holds, 1 otherwise: the figures are written either way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sets: a check, not figures to quote")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk in question")
    parser.add_argument("--out", type=Path, help="the JSON file; default: bench/results/tiers-<date>.json")
    arguments = parser.parse_args()

    command = "python bench/bench_tiers.py" + (" --quick" if arguments.quick else "")
    progress = Console(stderr=True)
    with progress.status("bench tiers") as status:
        plan = Plan.quick() if arguments.quick else Plan()
        report = run(plan, arguments.dir, command=command, peers=PEERS, tell=status.update)
    file = arguments.out or RESULTS / f"tiers-{report.date[:10]}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(encode(report))
    draw(report, file.with_suffix(".png"))
    table.render(report, Console())
    progress.print(f"written: {file}, {file.with_suffix('.png')}")
    return 1 if report.short_rows else 0


if __name__ == "__main__":
    sys.exit(main())
