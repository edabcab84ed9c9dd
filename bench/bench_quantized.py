"""Measures decoding from fp8 experts beside bf16 ones in as many bytes of memory: host budget, and slots of what is unpacked.

Run it on an idle machine: `python bench/bench_quantized.py [--quick] [--dir DIR] [--out FILE]`. The figures go to
bench/results/quantized-<date>.json. The bf16 model is the fp8 one as transformers dequantizes it, so that both have the same
tokens; their logits are compared bit by bit. Each round times both in alternating order on a prompt of its own.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from transformers.utils import logging

from paramstore_bench.decode.checkpoint import QUICK, SHAPES
from paramstore_bench.decode.quantized import measure_quantized
from paramstore_bench.frame import Script, wait_policy

SCRIPT = Script("quantized", __doc__, quick="a small model: a check, not figures to quote")
ROUNDS, QUICK_ROUNDS = 7, 2
BLOCKS = replace(QUICK, hidden=512)
"""The smallest whose matrices are whole blocks of 128 x 128."""


def main() -> int:
    """Runs the bench."""
    arguments = SCRIPT.parser().parse_args()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers left it so
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    shape, rounds = (BLOCKS, QUICK_ROUNDS) if arguments.quick else (SHAPES["bfloat16"], ROUNDS)
    return SCRIPT.run(arguments, lambda bench: measure_quantized(bench, shape=shape, rounds=rounds), facts=wait_policy())


if __name__ == "__main__":
    sys.exit(main())
