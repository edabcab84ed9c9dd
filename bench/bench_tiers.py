"""`paramstore bench tiers` with the peers beside it; writes bench/results/tiers-<date>.json and a picture next to it.

Run it on an idle machine: `python bench/bench_tiers.py [--quick] [--dir DIR] [--out FILE]`.
"""

from __future__ import annotations

import sys

from paramstore.bench.plan import Plan
from paramstore.bench.report.plot import draw
from paramstore.bench.tiers import run
from paramstore_bench.frame import Script
from peers import PEERS

SCRIPT = Script("tiers", __doc__, quick="small sets: a check, not figures to quote", draw=draw)


def main() -> int:
    """Runs the bench."""
    arguments = SCRIPT.parser().parse_args()
    plan, command = Plan.quick() if arguments.quick else Plan(), SCRIPT.command(is_quick=arguments.quick)
    return SCRIPT.report(arguments, lambda tell: run(plan, arguments.dir, command=command, peers=PEERS, tell=tell))


if __name__ == "__main__":
    sys.exit(main())
