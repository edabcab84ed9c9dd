"""Measures the update phase with the states on the volume, beside the limits of this machine and DeepSpeed ZeRO-Infinity; and the
native AdamW kernel beside torch. Writes bench/results/update-<date>.json and a picture next to it.

Run it on an idle machine: `python bench/bench_update.py [--quick] [--dir DIR] [--out FILE] [--rules touched,exact]`.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from deepspeed_peer import VARIABLE, missing_reason, start_all
from paramstore.bench.context import Bench
from paramstore.bench.plan import LARGE, SMALL, RecordSize
from paramstore.bench.report.rows import Row
from paramstore.bench.service.experts import adamw_schema, rule_is_known
from paramstore_bench.frame import Script
from paramstore_bench.native_update import QUICK_CASES, SERVED_DTYPES, measure_native, measure_served
from paramstore_bench.step_plot import draw_steps
from paramstore_bench.update_phase import cells_of, measure_phases

PARAMETERS = 151_000_000
"""Parameters that are updated: as many as in the training that the peers were measured with."""
STEPS, QUICK_STEPS = 9, 3
NATIVE_ROUNDS, QUICK_NATIVE_ROUNDS = 31, 5
QUICK_SHARE = 16
"""Divisor of the amounts in a quick check."""
QUICK_RESIDENT = (None, 0.5)


SCRIPT = Script("update", __doc__, quick="fewer and smaller records: a check, not figures to quote", draw=draw_steps)


def main() -> int:
    """Runs the bench. Rows left out are named in the file, with reasons."""
    parser = SCRIPT.parser()
    parser.add_argument("--rules", default="touched,exact", help="of touched, exact: what an apply does to idle records")
    arguments = parser.parse_args()
    python, rules = os.environ.get(VARIABLE), arguments.rules.split(",")
    left_out = {"DeepSpeed": reason} if (reason := missing_reason(python)) else {}
    known = [rule for rule in rules if rule_is_known(rule)]
    left_out |= {f"rule {rule}": "this version does not know it" for rule in rules if not rule_is_known(rule)}
    measure_rows = partial(measure, rules=known, python=None if "DeepSpeed" in left_out else python, is_quick=arguments.quick)
    return SCRIPT.run(arguments, measure_rows, left_out=left_out)


def measure(bench: Bench, *, rules: list[str], python: str | None, is_quick: bool) -> list[Row]:
    """Measures the update phase and the native kernel, with records of each size."""
    rows, sizes = list[Row](), (SMALL,) if is_quick else (LARGE, SMALL)
    for size in sizes:
        rows += measure_size(bench, size, rules, python, is_quick=is_quick)
    rows += measure_native(bench, QUICK_NATIVE_ROUNDS, QUICK_CASES) if is_quick else measure_native(bench, NATIVE_ROUNDS)
    for size in sizes:
        sized = replace(bench, plan=replace(bench.plan, expert_size=size))
        rows += [measure_served(sized, dtype, QUICK_NATIVE_ROUNDS if is_quick else NATIVE_ROUNDS) for dtype in SERVED_DTYPES]
    return rows


def measure_size(bench: Bench, size: RecordSize, rules: list[str], python: str | None, *, is_quick: bool) -> list[Row]:
    """Measures the update phase with records of this size. Peers know no records: they stand beside one size only."""
    bench = replace(bench, plan=replace(bench.plan, expert_size=size))
    elements = adamw_schema(size, torch.bfloat16).parameter_elements
    count = max(8, round((PARAMETERS / QUICK_SHARE if is_quick else PARAMETERS) / elements))
    with ExitStack() as stack:
        peers = []
        if python is not None and (size is LARGE or is_quick):
            bench.tell("DeepSpeed starts (the first time it compiles its operators, for minutes)")
            peers = list(start_all(python, stack.enter_context(bench.folder("deepspeed")), blocks=count, elements=elements))
            for peer in peers:
                stack.callback(peer.close)
        cells = [cell for rule in rules for cell in cells_of(rule) if not is_quick or cell.resident in QUICK_RESIDENT]
        return measure_phases(
            bench, cells, param_dtype=torch.bfloat16, count=count, threads=len(os.sched_getaffinity(0)),
            steps=QUICK_STEPS if is_quick else STEPS, peers=peers,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
