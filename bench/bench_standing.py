"""Measures visits of experts whose leases stand: 64 keys and 4 keys, beside acquire and release of the same keys.

Run it on an idle machine: `python bench/bench_standing.py [--quick] [--dir DIR] [--out FILE]`. It takes half a minute. Writes
bench/results/standing-<date>.json.
"""

from __future__ import annotations

import sys

from paramstore_bench.frame import Script
from paramstore_bench.standing import measure_standing

SCRIPT = Script("standing", __doc__, quick="fewer calls: to see that all is well, not to quote")


def main() -> int:
    """Runs the bench."""
    return SCRIPT.run(SCRIPT.parser().parse_args(), measure_standing)


if __name__ == "__main__":
    sys.exit(main())
