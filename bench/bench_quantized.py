"""Measures decoding from fp8 and mxfp4 experts beside bf16 ones in as many bytes of memory: host budget, and unpacked slots.

Run it on an idle machine: `python bench/bench_quantized.py [--quick] [--dir DIR] [--out FILE]`. The figures go to
bench/results/quantized-<date>.json. The bf16 model is the quantized one as transformers dequantizes it, so that both have the same
tokens; their logits are compared bit by bit. Each round times both in alternating order on a prompt of its own.
"""

from __future__ import annotations

import sys

from transformers.utils import logging

from paramstore_bench.decode.quantized import FULL, SMALL, measure_quantized
from paramstore_bench.frame import Script, wait_policy

SCRIPT = Script("quantized", __doc__, quick="a small model: a check, not figures to quote")
ROUNDS, QUICK_ROUNDS = 7, 2


def main() -> int:
    """Runs the bench."""
    arguments = SCRIPT.parser().parse_args()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers left it so
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    shapes, rounds = (SMALL, QUICK_ROUNDS) if arguments.quick else (FULL, ROUNDS)
    return SCRIPT.run(arguments, lambda bench: measure_quantized(bench, shapes=shapes, rounds=rounds), facts=wait_policy())


if __name__ == "__main__":
    sys.exit(main())
