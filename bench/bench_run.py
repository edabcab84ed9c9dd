"""Measures the first token of `paramstore run` on a checkpoint that was imported, beside a script of the same model by `ps.hf`.

Run it on an idle machine: `python bench/bench_run.py [--quick] [--out FILE]`. It takes five minutes. Writes
bench/results/run-<date>.json; needs transformers. Whole processes take turns, each with a daemon of its own; their tokens are
compared.
"""

from __future__ import annotations

import sys

from paramstore_bench.frame import Script, wait_policy
from paramstore_bench.run_process import measure_run

SCRIPT = Script("run", __doc__, quick="a few rounds of a tiny model: to see that all is well, not to quote")


def main() -> int:
    """Runs the bench."""
    arguments = SCRIPT.parser().parse_args()
    return SCRIPT.run(arguments, lambda bench: measure_run(bench, is_quick=arguments.quick), facts=wait_policy())


if __name__ == "__main__":
    sys.exit(main())
