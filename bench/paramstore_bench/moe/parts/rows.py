"""A layer in parts over a link of a known rate, beside the same layer in one: two nodes of two ranks each.

Experts leave the host alone while they compute, as a GPU does: they sleep, as long as their rows say. A layer could take at least
what its exchanges take without experts, or its experts without exchanges: both are timed in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore_bench.moe.links import run_on
from paramstore_bench.moe.parts.model import model_rows, simulated_rows
from paramstore_bench.moe.parts.task import FOUND, TASKS, PartsFound, PartsRun, PartsTask
from paramstore_bench.moe.sizes import Sizes
from paramstore_client.moe.pipeline_plan import SPLITS
from paramstore_testkit.nodes.links import shared_link

RATE_MBIT_S = 200.0
ROW_US = 80.0, 160.0, 320.0
SPEED_TARGET, BOUND_TARGET = Target("ratio", ">=", 1.25), Target("ratio", ">=", 0.55)
"""On the best number of parts: beside one part, and beside the longer of exchanging and computing."""


def parts_rows(folder: Path, *, is_quick: bool) -> Iterator[Row]:
    """Makes the rows; in an empty folder. Raises StoreUnavailable where a rank ends early."""
    runs: dict[str, PartsRun] = {}
    for tokens in (1024,) if is_quick else (768, 1536):
        for row_us in ROW_US:
            sizes = Sizes(experts=32, width=512, inner=1, tokens=tokens // 8 if is_quick else tokens, top_k=1, skew=0.0)
            task = PartsTask(sizes, row_us, rounds=2 if is_quick else 5)
            case = f"{task.sizes}, {task.row_us:g} us a row"
            run = runs[case] = _found(task, folder)
            for split in SPLITS:
                found = [each for each in run.found if each.split == split]
                best = max(found, key=lambda each: each.pairs.ratio)
                for each in found:
                    yield from _rows(case, run, each, is_best=each is best)
    yield from model_rows(runs)
    yield from simulated_rows(runs)


def _rows(case: str, run: PartsRun, found: PartsFound, *, is_best: bool) -> Iterator[Row]:
    taken = found.pairs.parts()
    bound_s = max(run.exchange_s, run.compute_s)
    case = f"{case}, {found.parts} parts of {found.split}"
    times = {"exchange_s": run.exchange_s, "compute_s": run.compute_s}
    yield judged(
        Row(
            name="layer in parts over a link", case=case, subject=SUBJECT, value=found.pairs.rate, unit="rows/s",
            against="one part", limit=found.pairs.limit_rate, ratio=found.pairs.ratio, ratio_min=found.pairs.ratio_min,
            ratio_max=found.pairs.ratio_max,
            target=SPEED_TARGET if is_best else None, parts={**{name: taken[name] for name in ("ours_s", "limit_s")}, **times},
        )
    )  # fmt: skip
    bounds = [bound_s / pair.ours.seconds for pair in found.pairs.pairs]
    yield judged(
        Row(
            name="layer in parts, beside its bound", case=case, subject=SUBJECT, value=taken["ours_s"], unit="s",
            against="the longer of exchanging and computing", limit=bound_s, ratio=sorted(bounds)[len(bounds) // 2],
            ratio_min=min(bounds), ratio_max=max(bounds), target=BOUND_TARGET if is_best else None,
        )
    )  # fmt: skip


def _found(task: PartsTask, folder: Path) -> PartsRun:
    (folder / TASKS).write_bytes(msgspec.json.encode(task))
    run_on(shared_link(RATE_MBIT_S), "paramstore_bench.moe.parts.rank", folder)
    return msgspec.json.decode((folder / FOUND).read_bytes(), type=PartsRun)
