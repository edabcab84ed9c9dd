"""Measures how long one turn of the daemon's event loop takes at most, while 131,072 small records are committed and rolled back.

Run it on an idle machine: `python bench/bench_turns.py [--dir DIR] [--keys N] [--out FILE]`. It takes ten minutes and 5 GB. Writes
bench/results/turns-<date>.json.
"""

from __future__ import annotations

import sys
from functools import partial

from paramstore.daemon.garbage import tables_spared
from paramstore_bench.frame import Script
from paramstore_bench.turns import KEYS, measure_turns

SCRIPT = Script("turns", __doc__)


def main() -> int:
    """Runs the bench."""
    parser = SCRIPT.parser()
    parser.add_argument("--keys", type=int, default=KEYS, help="number of records")
    arguments = parser.parse_args()
    with tables_spared():
        return SCRIPT.run(arguments, partial(measure_turns, keys=arguments.keys))


if __name__ == "__main__":
    sys.exit(main())
