"""Measures making one expert's matrices of fp8 and of mxfp4, beside transformers' own conversions of the same bytes.

Run it on an idle machine: `python bench/bench_dequantize.py [--quick] [--out FILE]`. It takes a minute. Writes
bench/results/dequantize-<date>.json; needs transformers. Both results are compared bit by bit.
"""

from __future__ import annotations

import sys

from paramstore_bench.dequantize import measure_dequantize
from paramstore_bench.frame import Script, wait_policy

SCRIPT = Script("dequantize", __doc__, quick="fewer rounds of small matrices: to see that all is well, not to quote")


def main() -> int:
    """Runs the bench."""
    arguments = SCRIPT.parser().parse_args()
    return SCRIPT.run(arguments, lambda bench: measure_dequantize(bench, is_quick=arguments.quick), facts=wait_policy())


if __name__ == "__main__":
    sys.exit(main())
